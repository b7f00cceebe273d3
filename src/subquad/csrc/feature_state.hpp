// Attention by features, w_ij = Σ_r e^{x_ir + y_jr}: exponents of tiles of tokens, and the state that tokens leave behind.
//
//     S_r = Σ_j e^{y_jr − c_r} v_j     z_r = Σ_j e^{y_jr − c_r} a_j     c_r = max_j y_jr
//
// Forwards the tokens are keys, with their values and a = 1. Backwards they are also queries, with the gradients of
// their outputs, x′_ir for y and dlse_i − Δ_i for a. A tile's exponents lie as (R,TILE), tokens as lanes:
//
//              64 tokens →                      E′ →
//          ┌───────────────┐               ┌───────────┐
//      R   │ e^{y_jr − c_r} │  ·  64 tokens │ values    │   is added to   S (R,E′)
//      ↓   │               │               └───────────┘
//          └───────────────┘  ·  (64) a, a column              is added to   z (R)
//
// c_r only rises: when a tile has a larger exponent, S_r and z_r shrink to the new base (`raise`), so no e^… exceeds 1.
//
// Large exponents leave fp32 no digits for what counts in their differences. So x_ir meets c_r first, as in the forward
// pass, and then lse_i: x′_ir = ((x_ir + c_r) − lse_i) − residual_i, which is relative to the base c_r of the state of
// queries; keys add y_jr − c_r, which is exact where the weight counts. The base follows the keys that queries see.

constexpr int64_t TILE = 64;        // tokens
constexpr int64_t PITCH = 16;       // of the rows of projections, which the caller pads: whole vectors in every variant
constexpr int64_t PRODUCT_DEPTH = 128;  // rows of a state that stay in the first-level cache

static void gemm_deep(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                      const float *b, int64_t b_row, float *c, int64_t c_row, bool add) {
  int64_t d = 0;
  do {
    const int64_t part = depth - d < PRODUCT_DEPTH ? depth - d : PRODUCT_DEPTH;
    gemm(rows, columns, part, a + d * a_step, a_row, a_step, b + d * b_row, b_row, c, c_row, add || d > 0);
  } while ((d += PRODUCT_DEPTH) < depth);
}

// Tokens of one side, and what they put into a state.
struct FeatureSide {
  Rows rows;                // (B,heads,tokens,width)
  int64_t tokens, width;
  const float *projection;  // (R,width′) for a head; null: the rows are exponents
  int64_t projection_head;
  const float *bias;        // (R) for a head, added to all exponents of a feature; null: 0
  int64_t bias_head;
  const float *shift;       // (tokens) for a head, added to its exponents, and −∞ takes a token out; null: 0
  int64_t shift_batch, shift_head;
  Rows payload;             // (B,heads,tokens,E), or null for zeros
  const float *weight;      // a, laid out as `shift`; null: 1
  const float *lse, *residual;  // of queries backwards, laid out as `shift`: their exponents are made relative by them
  int64_t together;         // heads that share a state

  const float *of_head(const float *what, int64_t b, int64_t h) const {
    return what ? what + b * shift_batch + h * shift_head : nullptr;
  }

  // The side as `count` of its features from `first` on have it.
  FeatureSide of_features(int64_t first, int64_t count) const {
    FeatureSide part = *this;
    if (projection) {
      part.projection += first * round_up(width, PITCH);
    } else {
      part.rows.data = (float *)rows.data + first;
      part.width = count;
    }
    if (bias) part.bias += first;
    return part;
  }
};

struct FeatureState {
  float *sums;               // (R,E′)
  float *totals, *largest;   // (R)
  float *base;               // (R) what the exponents of queries are relative to; 0 for keys
  int64_t features, width;
  float unit;  // of the sums and totals: forwards so small that no sum of values overflows whose mean does not

  FeatureState(Arena &arena, int64_t R, int64_t E, float unit) : features(R), width(round_up(E, W)), unit(unit) {
    sums = arena.take<float>(R * width);
    totals = arena.take<float>(R);
    largest = arena.take<float>(R);
    base = arena.take<float>(R);
  }

  FeatureState of_features(int64_t first, int64_t count) const {
    FeatureState part = *this;
    part.sums += first * width, part.totals += first, part.largest += first, part.base += first;
    part.features = count;
    return part;
  }

  void copy(const FeatureState &from) const {
    for (int64_t i = 0; i < features * width; i++) sums[i] = from.sums[i];
    for (int64_t r = 0; r < features; r++)
      totals[r] = from.totals[r], largest[r] = from.largest[r], base[r] = from.base[r];
  }

  // Exponents relative to other maxima of keys; a feature that no key has keeps its base.
  void rebase(const float *to) const {
    for (int64_t r = 0; r < features; r++) {
      if (to[r] == base[r] || to[r] == -__builtin_inff()) continue;
      if (largest[r] != -__builtin_inff()) largest[r] += to[r] - base[r];
      base[r] = to[r];
    }
  }

  void clear() const {
    zero(sums, features * width);
    zero(totals, features);
    zero(base, features);
    for (int64_t r = 0; r < features; r++) largest[r] = -__builtin_inff();
  }

  // Changes the base to the maxima `now`, none of which is smaller than its own.
  void raise(const float *now) const {
    for (int64_t r = 0; r < features; r++) {
      if (now[r] == largest[r]) continue;
      const float shrink = __builtin_expf(largest[r] - now[r]);
      for (int64_t e = 0; e < width; e += W) store(sums + r * width + e, load(sums + r * width + e) * shrink);
      totals[r] *= shrink;
      largest[r] = now[r];
    }
  }

  void add(const FeatureState &other) const {
    for (int64_t r = 0; r < features; r++) {
      const float high = largest[r] > other.largest[r] ? largest[r] : other.largest[r];
      if (high == -__builtin_inff()) continue;
      const float own = __builtin_expf(largest[r] - high), more = __builtin_expf(other.largest[r] - high);
      float *row = sums + r * width;
      const float *from = other.sums + r * width;
      for (int64_t e = 0; e < width; e += W) store(row + e, load(row + e) * own + load(from + e) * more);
      totals[r] = totals[r] * own + other.totals[r] * more;
      largest[r] = high;
    }
  }
};

struct FeatureScratch {
  float *rows, *columns;  // a tile's rows (TILE,width′) and their transpose
  float *shift, *weight;  // (TILE + W)
  float *exponents;       // (R,TILE), as are these
  float *features, *other_features, *slopes;
  Pieces<float> of_heads;  // a head: (R,TILE) the other side's exponents
  Pieces<float> relative;  // the same, relative to the keys' maxima
  float *payload, *payload_columns;  // (TILE,E′), (E,TILE)
  float *others, *other_columns;     // the other side's
  float *value_grads;     // (TILE,E′)
  float *out;             // (TILE, the widest row)
  float *pairs, *pair_slopes;  // (TILE,TILE)
  float *high, *total;    // (TILE)
  float *raised, *seen;   // (R)
  FeatureState spare;

  FeatureScratch(Arena &arena, const FeatureInputs &in, bool backward, float unit)
      : spare(arena, in.features, in.E, unit) {
    const int64_t R = round_up(in.features, W), E = round_up(in.E, W), tile = R * TILE + W;
    int64_t widest = in.query_width > in.key_width ? in.query_width : in.key_width;
    widest = widest > in.features ? widest : in.features;
    const int64_t wide = round_up(widest > in.E ? widest : in.E, W);
    rows = arena.take<float>(TILE * wide);
    columns = arena.take<float>(wide * TILE);
    shift = arena.take<float>(TILE + W);
    weight = arena.take<float>(TILE + W);
    exponents = arena.take<float>(tile);
    features = arena.take<float>(tile);
    other_features = arena.take<float>(tile);
    slopes = arena.take<float>(backward ? tile : 0);
    of_heads = arena.take_each<float>(in.H / in.G, tile);
    payload = arena.take<float>(TILE * E);
    payload_columns = arena.take<float>(backward ? E * TILE + W : 0);
    others = arena.take<float>(backward ? TILE * E : 0);
    other_columns = arena.take<float>(backward ? E * TILE + W : 0);
    value_grads = arena.take<float>(backward ? TILE * E : 0);
    out = arena.take<float>(TILE * wide);
    pairs = arena.take<float>(TILE * TILE);
    pair_slopes = arena.take<float>(backward ? TILE * TILE : 0);
    high = arena.take<float>(TILE);
    total = arena.take<float>(TILE);
    raised = arena.take<float>(R);
    seen = arena.take<float>(R);
    relative = arena.take_each<float>(backward ? in.H / in.G : 0, tile);
  }
};

// A row's lanes from `count` on are replaced; those before `first` are 0.
static inline vf lanes_before(int64_t count, vf x, float otherwise) {
  if (count >= W) return x;
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return select(lane < (int32_t)count, x, splat(otherwise));
}

static inline vf lanes_from(int64_t first, vf x) {
  if (first <= 0) return x;
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return select(lane < (int32_t)first, vf{}, x);
}

// A maximum as a number to subtract: −∞ is that of no token, and −∞ − (−∞) would be NaN.
static inline vf base_of(vf largest) { return select(largest == -__builtin_inff(), vf{}, largest); }
static inline float base_of(float largest) { return largest == -__builtin_inff() ? 0 : largest; }

// Rows of the tokens from `first` on, those that are taken out (shift −∞) as zeros, and zeros to whole vectors both ways.
static void pack_counted(const Rows &rows, int64_t b, int64_t h, int64_t first, int64_t count, int64_t width,
                         const float *shift, float *to) {
  const int64_t padded = round_up(width, W);
  for (int64_t i = 0; i < count; i++) {
    // Rows lie far apart, and the next tile's are wanted when this one's products are done.
    for (int64_t d = 0; rows.data && d < width; d += 16)
      __builtin_prefetch(row_of<float>(rows, b, h, first + i + TILE) + d, 0, 2);
    if (rows.data && shift[i] != -__builtin_inff())
      load_row(row_of<float>(rows, b, h, first + i), width, to + i * padded, padded);
    else
      zero(to + i * padded, padded);
  }
  zero(to + count * padded, (round_up(count, W) - count) * padded);
}

// A tile's shifts, weights and exponents.
static void tile_exponents(const FeatureSide &side, int64_t R, int64_t b, int64_t h, int64_t first, int64_t count,
                           float *to, const FeatureScratch &own) {
  const int64_t lanes = round_up(count, W), width = round_up(side.width, W);
  const float *shift = side.of_head(side.shift, b, h), *weight = side.of_head(side.weight, b, h);
  for (int64_t i = 0; i < TILE + W; i++) {  // parts of a tile are read in whole vectors
    own.shift[i] = i >= count ? -__builtin_inff() : shift ? shift[first + i] : 0;
    own.weight[i] = i >= count ? 0 : weight ? weight[first + i] : 1;
  }
  pack_counted(side.rows, b, h, first, count, side.width, own.shift, own.rows);
  pack_transposed(own.rows, lanes, side.width, width, side.projection ? own.columns : to, TILE);
  if (side.projection)
    gemm_deep(R, lanes, side.width, side.projection + h * side.projection_head, round_up(side.width, PITCH), 1,
              own.columns, TILE, to, TILE, false);
  if (!shift && !side.bias && lanes == count) return;
  for (int64_t r = 0; r < R; r++) {
    const float bias = side.bias ? side.bias[h * side.bias_head + r] : 0;
    for (int64_t j = 0; j < lanes; j += W)
      store(to + r * TILE + j, load(to + r * TILE + j) + bias + load(own.shift + j));
  }
}

// largest ← its maximum with each feature's largest exponent of `count` tokens. Returns whether all are numbers below
// infinity; −∞ is one.
static bool raise_largest(const float *exponents, int64_t R, int64_t count, float *largest) {
  vi numbers = vi{} - 1;
  for (int64_t r = 0; r < R; r++) {
    vf high = splat(largest[r]);
    for (int64_t j = 0; j < count; j += W) {
      const vf x = lanes_before(count - j, load(exponents + r * TILE + j), -__builtin_inff());
      numbers &= x <= splat(__FLT_MAX__);
      high = maximum(x, high);
    }
    largest[r] = highest(high);
  }
  return all_set(numbers);
}

// Whether `count` numbers, in whole vectors that may be read, are all finite.
static bool all_finite(const float *x, int64_t count) {
  vi numbers = vi{} - 1;
  for (int64_t i = 0; i < count; i += W) {
    const vf part = lanes_before(count - i, load(x + i), 0);
    numbers &= (part <= splat(__FLT_MAX__)) & (part >= splat(-__FLT_MAX__));
  }
  return all_set(numbers);
}

// features ← e^{exponents − largest} in units of the state, 0 behind `count`.
static void exponentiate(const FeatureState &state, const float *exponents, int64_t count, float *features) {
  for (int64_t r = 0; r < state.features; r++) {
    const float base = base_of(state.largest[r]);
    for (int64_t j = 0; j < count; j += W) {
      const vf powers = exp_nonpositive(load(exponents + r * TILE + j) - base) * state.unit;
      store(features + r * TILE + j, lanes_before(count - j, powers, 0));
    }
  }
}

// Queries' exponents relative to the maxima `seen` of the keys that they see; −∞ stays.
static void make_relative(const float *exponents, int64_t R, int64_t count, const float *seen, const float *lse,
                          const float *residual, float *to) {
  for (int64_t r = 0; r < R; r++)
    for (int64_t j = 0; j < count; j += W) {
      const vf x = load(exponents + r * TILE + j), from = ((x + seen[r]) - load(lse + j)) - load(residual + j);
      store(to + r * TILE + j, select(x == -__builtin_inff(), x, from));
    }
}

// The state, whose maxima are those of the features already, with `count` tokens more.
static void add_tile(const FeatureState &state, const float *features, int64_t count, const float *payload,
                     const float *weight) {
  for (int64_t r = 0; r < state.features; r++) {
    vf total = {};
    for (int64_t j = 0; j < count; j += W)  // after `count` comes another head's weight, which may be NaN
      total += load(features + r * TILE + j) * lanes_before(count - j, load(weight + j), 0);
    state.totals[r] += sum(total);
  }
  gemm(state.features, state.width, count, features, TILE, 1, payload, state.width, state.sums, state.width, true);
}

// Tokens [from, to) of all heads that share the state; queries, relative to the maxima `seen` of the keys that they see.
static void add_tokens(const FeatureState &state, const FeatureSide &side, int64_t E, int64_t b, int64_t group,
                       int64_t from, int64_t to, const float *seen, const FeatureScratch &own) {
  if (seen) state.rebase(seen);
  from = from < 0 ? 0 : from;
  to = to < side.tokens ? to : side.tokens;
  const int64_t R = state.features;
  for (int64_t h = group * side.together; h < (group + 1) * side.together; h++)
    for (int64_t at = from; at < to; at += TILE) {
      const int64_t count = to - at < TILE ? to - at : TILE;
      tile_exponents(side, R, b, h, at, count, own.exponents, own);
      if (seen)
        make_relative(own.exponents, R, count, seen, side.of_head(side.lse, b, h) + at,
                      side.of_head(side.residual, b, h) + at, own.exponents);
      pack_counted(side.payload, b, h, at, count, E, own.shift, own.payload);
      for (int64_t r = 0; r < R; r++) own.raised[r] = state.largest[r];
      raise_largest(own.exponents, R, count, own.raised);
      state.raise(own.raised);
      exponentiate(state, own.exponents, count, own.features);
      add_tile(state, own.features, count, own.payload, own.weight);
    }
}
