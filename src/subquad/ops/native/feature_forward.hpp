// The forward pass of attention by features. Queries read the state of the keys before their tile:
//
//     m_i = max_r (x_ir + c_r)     φ_ir = e^{x_ir + c_r − m_i}     out_i = Σ_r φ_ir S_r / Σ_r φ_ir z_r
//
// and the keys of their own tile in pairs, with maxima c that are those of the whole tile. A tile whose keys raise some
// c_r so far that its first queries' weights might vanish is taken in halves, down to single tokens.

constexpr float MOST_RISE = 40;      // e⁻⁴⁰ of weights that vanish at e⁻⁸⁷
constexpr int64_t PAIR_ROWS = 16;    // of the triangle of pairs, in one product
constexpr int64_t QUERY_PIECE = 256; // queries of a task, where their order does not matter

static FeatureSide keys_of(const auto &a) {
  const Sizes &s = a.sizes;
  return {a.key,        s.M,          s.K,     a.of_key, a.of_key_head, a.key_bias, a.key_bias_batch,
          a.key_bias_head, a.value, nullptr, 1};
}

static FeatureSide queries_of(const auto &a) {
  const Sizes &s = a.sizes;
  return {a.query, s.N, s.D, a.of_query, a.of_query_head, nullptr, 0, 0, {}, nullptr, s.H / s.G};
}

// For each feature the maximum over the keys that query `first` sees, and over those of `count` tokens from it.
// Returns whether the second is much above the first.
static bool rises(const FeatureState &state, const float *exponents, int64_t count, float *raised) {
  for (int64_t r = 0; r < state.features; r++) raised[r] = state.largest[r];
  raise_largest(exponents, state.features, count, raised);
  bool far = false;
  for (int64_t r = 0; r < state.features; r++) {
    const float first = exponents[r * TILE], seen = first > state.largest[r] ? first : state.largest[r];
    far |= raised[r] - seen > MOST_RISE;
  }
  return far;
}

// φ of queries; m to `high`, and the weight that they give the state to `total`.
static void query_features(const FeatureState &state, const float *exponents, int64_t count, float *features,
                           float *high, float *total) {
  for (int64_t i = 0; i < count; i += W) {
    vf most = splat(-__builtin_inff()), weight = {};
    for (int64_t r = 0; r < state.features; r++)
      most = maximum(load(exponents + r * TILE + i) + state.largest[r], most);
    const vf base = base_of(most);
    for (int64_t r = 0; r < state.features; r++) {
      const vf phi = exp_nonpositive(load(exponents + r * TILE + i) + state.largest[r] - base);
      weight += phi * state.totals[r];
      store(features + r * TILE + i, phi);
    }
    store(high + i, most);
    store(total + i, weight);
  }
}

// The weights of a tile's own keys, up to each query's own: to its total, and their values to out.
static void attend_own(const float *of_queries, const float *of_keys, int64_t R, int64_t count, const float *values,
                       int64_t width, const FeatureScratch &own) {
  for (int64_t from = 0; from < count; from += PAIR_ROWS) {
    const int64_t rows = count - from < PAIR_ROWS ? count - from : PAIR_ROWS, lanes = round_up(from + rows, W);
    float *pairs = own.pairs + from * TILE;
    gemm_deep(rows, lanes, R, of_queries + from, 1, TILE, of_keys, TILE, pairs, TILE, false);
    for (int64_t i = 0; i < rows; i++) {
      vf total = {};
      for (int64_t j = 0; j < lanes; j += W) {
        const vf weights = lanes_before(from + i + 1 - j, load(pairs + i * TILE + j), 0);
        store(pairs + i * TILE + j, weights);
        total += weights;
      }
      own.total[from + i] += sum(total);
    }
    gemm(rows, width, from + rows, pairs, TILE, 1, values, width, own.out + from * width, width, true);
  }
}

// Queries [at, at + count), whose exponents are given, with the state and, under `causal`, the features of their own keys.
static void attend_queries(const FeatureForward &a, const FeatureState &state, int64_t b, int64_t h, int64_t at,
                           int64_t count, const float *exponents, const float *of_keys, const float *values,
                           const FeatureScratch &own) {
  const Sizes &s = a.sizes;
  query_features(state, exponents, count, own.other_features, own.high, own.total);
  gemm_deep(count, state.width, s.C, own.other_features, 1, TILE, state.sums, state.width, own.out, state.width, false);
  if (of_keys) attend_own(own.other_features, of_keys, s.C, count, values, state.width, own);
  for (int64_t i = 0; i < count; i++) {
    const float total = own.total[i], norm = total == 0 ? 0 : 1 / total;
    a.lse[(b * s.H + h) * s.N + at + i] = total == 0 ? -__builtin_inff() : own.high[i] + __builtin_logf(total);
    float *row = own.out + i * state.width;
    for (int64_t e = 0; e < state.width; e += W) store(row + e, load(row + e) * norm);
    store_row(row, s.E, row_of<float>(a.out, b, h, at + i));
  }
}

// Queries of one head that see the same keys.
static void attend_state(const FeatureForward &a, const FeatureSide &queries, const FeatureState &state, int64_t b,
                         int64_t h, int64_t from, int64_t to, const FeatureScratch &own) {
  for (int64_t at = from; at < to; at += TILE) {
    const int64_t count = to - at < TILE ? to - at : TILE;
    tile_exponents(queries, a.sizes.C, b, h, at, count, own.exponents, own);
    attend_queries(a, state, b, h, at, count, own.exponents, nullptr, nullptr, own);
  }
}

// Tokens [first, first + count) of the tile at `at`: their queries, then their keys into the state.
static void attend_part(const FeatureForward &a, const FeatureState &state, int64_t b, int64_t g, int64_t at,
                        int64_t first, int64_t count, const FeatureScratch &own) {
  const Sizes &s = a.sizes;
  if (rises(state, own.exponents + first, count, own.raised) && count > 1) {
    attend_part(a, state, b, g, at, first, count / 2, own);
    return attend_part(a, state, b, g, at, first + count / 2, count - count / 2, own);
  }
  state.raise(own.raised);
  exponentiate(own.exponents + first, s.C, count, state.largest, own.features);
  const int64_t group = s.H / s.G;
  const float *values = own.payload + first * state.width;
  for (int64_t i = 0; i < group; i++)
    attend_queries(a, state, b, g * group + i, at + first, count, own.of_heads + i * (s.C * TILE + W) + first,
                   own.features, values, own);
  add_tile(state, own.features, count, values, own.weight + first);
}

static void attend_causally(const FeatureForward &a, const FeatureSide &queries, const FeatureSide &keys,
                            const FeatureState &state, int64_t b, int64_t g, int64_t from, int64_t to,
                            const FeatureScratch &own) {
  const Sizes &s = a.sizes;
  const int64_t group = s.H / s.G;
  for (int64_t at = from; at < to; at += TILE) {
    const int64_t count = to - at < TILE ? to - at : TILE;
    for (int64_t i = 0; i < group; i++)
      tile_exponents(queries, s.C, b, g * group + i, at, count, own.of_heads + i * (s.C * TILE + W), own);
    tile_exponents(keys, s.C, b, g, at, count, own.exponents, own);
    pack_counted(a.value, b, g, at, count, s.E, own.shift, own.payload);
    attend_part(a, state, b, g, at, 0, count, own);
  }
}

static void attend_lagged(const FeatureForward &a, const Visible &visible, const FeatureSide &queries,
                          const FeatureSide &keys, const FeatureState &state, int64_t b, int64_t g, int64_t from,
                          int64_t to, const FeatureScratch &own) {
  const Sizes &s = a.sizes;
  const int64_t group = s.H / s.G;
  for (int64_t at = from; at < to; at += visible.block) {
    const int64_t end = at + visible.block < to ? at + visible.block : to, behind = at - visible.shift();
    add_tokens(state, keys, s.E, b, g, behind, behind + visible.block, own);
    for (int64_t h = g * group; h < (g + 1) * group; h++) attend_state(a, queries, state, b, h, at, end, own);
  }
}

static int64_t feature_forward(const FeatureForward &a) {
  const Sizes &s = a.sizes;
  const Visible visible{a.block, a.lag};
  const int64_t groups = s.B * s.G;
  Arena arena{(char *)a.workspace};
  const RangeStates states(arena, s, Ranges(groups, s.M, visible.unit(), s.threads), visible.shift(),
                           visible.all() ? 0 : 1);
  const PerThread<FeatureScratch> scratch(arena, s, false);
  if (!arena.base) return arena.used;

  const FeatureSide keys = keys_of(a), queries = queries_of(a);
  const Stage sums = {states.tasks(s), [&](int64_t task, int t) { states.sum(s, keys, task, scratch.of[t]); }};
  const Stage combined = {states.ranges.count > 1 ? groups : 0, [&](int64_t group, int) { states.combine(group); }};
  const int64_t pieces = (s.N + QUERY_PIECE - 1) / QUERY_PIECE;
  const Stage reads = {visible.all() ? s.B * s.H * pieces : 0, [&](int64_t task, int t) {
    const int64_t bh = task / pieces, b = bh / s.H, h = bh % s.H, from = task % pieces * QUERY_PIECE;
    attend_state(a, queries, states.at(b * s.G + h / (s.H / s.G), 0), b, h, from,
                 from + QUERY_PIECE < s.N ? from + QUERY_PIECE : s.N, scratch.of[t]);
  }};
  const Stage scans = {visible.all() ? 0 : states.tasks(s), [&](int64_t task, int t) {
    const int64_t group = task / states.ranges.count, from = task % states.ranges.count * states.ranges.size;
    const int64_t to = from + states.ranges.size < s.N ? from + states.ranges.size : s.N, b = group / s.G;
    if (visible.lag > 0)
      attend_lagged(a, visible, queries, keys, states.of[task], b, group % s.G, from, to, scratch.of[t]);
    else
      attend_causally(a, queries, keys, states.of[task], b, group % s.G, from, to, scratch.of[t]);
  }};
  parallel_stages(s.threads, sums, combined, reads, scans);
  return arena.used;
}
