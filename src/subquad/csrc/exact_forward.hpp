// Exact attention and its log-sum-exp, a tile of queries at a time. Queries are lanes and keys are rows, so that keys and
// values are read where the caller has them, and the softmax runs down the lanes:
//
//                 queries, lanes →
//               ┌────────────────┐
//     a tile of │ logits K·Qᵀ    │   → e^{logit − the highest so far}; its transpose × values → the queries' sums,
//     keys   ↓  │                │     which shrink when a later tile has a higher logit
//               └────────────────┘
//
// The sums of EXACT_SPAN keys start at 0 and are then added to those of all keys before: in one sum over all keys, rounding
// errors would grow with their number.
//
// Weights are 2^−SHRUNK of what they are, as in buckets. A query that sees keys, all with logits of −∞, has an output of
// NaN, as softmax does; one that sees none, or is padding, has 0. Tiles of padding alone are left out.

constexpr int64_t EXACT_KEYS = 96;               // of a tile: whole blocks of a product
constexpr int64_t EXACT_SPAN = 32 * EXACT_KEYS;  // keys of one sum

template <class T>
struct ExactScratch {
  Number<T> *rows, *queries;         // (Q',D') the queries, and transposed (D,Q')
  float *logits;                     // (EXACT_KEYS,Q'), and the weights
  Number<T> *keys, *values;          // (EXACT_KEYS,D'), (EXACT_KEYS,E') where the caller's cannot be read in place
  float *value;                      // (E')
  float *out;                        // (Q',E')
  float *highest, *total, *shrink;   // (Q')
  float *all_out;                    // (Q',E') the sums of the keys before
  float *all_total, *all_highest;    // (Q') and what these are relative to

  ExactScratch(Arena &arena, const ExactInputs &in) {
    const int64_t D = round_up(steps_of<Number<T>>(in.D), W), E = round_up(in.E, W), Q = EXACT_QUERIES;
    rows = arena.take<Number<T>>(Q * D);
    queries = arena.take<Number<T>>(D * Q);
    logits = arena.take<float>(EXACT_KEYS * Q);
    keys = arena.take<Number<T>>(EXACT_KEYS * D);
    values = arena.take<Number<T>>(steps_of<Number<T>>(EXACT_KEYS) * E);
    value = arena.take<float>(E);
    out = arena.take<float>(Q * E);
    highest = arena.take<float>(Q);
    total = arena.take<float>(Q);
    shrink = arena.take<float>(Q);
    all_out = arena.take<float>(Q * E);
    all_total = arena.take<float>(Q);
    all_highest = arena.take<float>(Q);
  }

  Number<T> *weights() const { return (Number<T> *)logits; }
};

// Logits to weights, and what the sums of earlier tiles shrink by. Whether any of them shrinks.
template <class T>
static bool weigh_tile(int64_t count, int64_t lanes, const ExactScratch<T> &own) {
  bool shrinks = false;
  for (int64_t v = 0; v < lanes; v += W) {
    const float *column = own.logits + v;
    Number<T> *to = own.weights() + v;  // in the logits' place, which have been read
    const vf before = load(own.highest + v);
    vf high = before, sums = {};
    for (int64_t j = 0; j < count; j++) high = maximum(load(column + j * lanes), high);
    const vf base = select(high == splat(-__builtin_inff()), vf{}, high);
    auto weight = [&](int64_t j) {
      const vf p = weight_of<Number<T>>(load(column + j * lanes) - base);
      sums += p;
      return p;
    };
    if constexpr (Factor<T>::PAIRED) {
      for (int64_t j = 0; j < count; j += 2, to += lanes) {
        const vf p = weight(j);
        store(to, paired(p, j + 1 < count ? weight(j + 1) : vf{}));
      }
    } else {
      for (int64_t j = 0; j < count; j++) store(to + j * lanes, weight(j));
    }
    const vf shrink = select(before == high, splat(1), exp_nonpositive(before - base));
    store(own.highest + v, high);
    store(own.shrink + v, shrink);
    store(own.total + v, load(own.total + v) * shrink + sums);
    shrinks |= !all_set(shrink == splat(1));
  }
  return shrinks;
}

// Adds the sums to those of all keys before, and starts them again at 0.
template <class T>
static void add_span(int64_t queries, int64_t lanes, int64_t E, const ExactScratch<T> &own) {
  for (int64_t v = 0; v < lanes; v += W) {
    const vf before = load(own.all_highest + v), high = load(own.highest + v);
    const vf base = select(high == splat(-__builtin_inff()), vf{}, high);
    const vf shrink = select(before == high, splat(1), exp_nonpositive(before - base));
    store(own.all_highest + v, high);
    store(own.shrink + v, shrink);
    store(own.all_total + v, load(own.all_total + v) * shrink + load(own.total + v));
    store(own.total + v, vf{});
  }
  for (int64_t i = 0; i < queries; i++)
    for (int64_t e = i * E; e < (i + 1) * E; e += W) {
      store(own.all_out + e, load(own.all_out + e) * own.shrink[i] + load(own.out + e));
      store(own.out + e, vf{});
    }
}

// Values of keys that some queries do not see, where these are not finite: 0·∞ is NaN, and may not reach those queries.
// They are set to 0 in a copy for the product, and added to the queries that see them one by one.
template <class T>
static TileRows<Number<T>> add_apart(const ExactInputs &in, int64_t b, int64_t g, const Positions &keys, int64_t first,
                                     int64_t count, int64_t first_query, int64_t queries, int64_t lanes,
                                     TileRows<Number<T>> values, const ExactScratch<T> &own) {
  const int64_t E = round_up(in.E, W);
  for (int64_t j = 0; j < count; j++) {
    const int64_t hidden = hidden_lanes(in, keys, first + j, first_query);
    if (hidden == 0) continue;
    load_row(row_of<T>(in.value, b, g, keys[first + j]), in.E, own.value, E);
    if (is_finite(own.value, E)) continue;
    if (values.first != own.values) {
      pack_factor_steps<T>(in.value, b, g, keys.at, first, count, in.E, own.values, E);
      values = {own.values, E};
    }
    for (int64_t q = hidden; q < queries; q++)
      for (int64_t e = 0; e < E; e++) own.out[q * E + e] += number_at(own.weights(), j, lanes, q) * own.value[e];
    zero_row(own.values, j, E);
  }
  return values;
}

template <class T>
static void attend_exactly(const ExactForward &a, int64_t b, int64_t h, int64_t first_query, const Positions &keys,
                           const ExactScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const int64_t g = h / (in.H / in.G), left = in.N - first_query, E = round_up(in.E, W);
  const int64_t steps = steps_of<Number<T>>(in.D), D = round_up(steps, W);
  const int64_t queries = left < EXACT_QUERIES ? left : EXACT_QUERIES, lanes = round_up(queries, W);
  pack_factor_rows<T>(in.query, b, h, nullptr, first_query, queries, in.D, own.rows, D);
  for (int64_t i = queries * D; i < lanes * D; i++) own.rows[i] = {};
  pack_factors_across(own.rows, lanes, steps, D, own.queries, lanes);
  for (int64_t i = 0; i < lanes; i++) {
    own.highest[i] = own.all_highest[i] = -__builtin_inff();
    own.total[i] = own.all_total[i] = 0;
  }
  zero(own.out, lanes * E);
  const bool padding = is_padding(in, b, first_query, queries);
  const int64_t seen = padding ? 0 : seen_keys(in, keys, first_query + queries - 1);
  const bool one_span = seen <= EXACT_SPAN;
  if (!one_span) zero(own.all_out, lanes * E);
  const int64_t by_all = seen_keys(in, keys, first_query);
  for (int64_t first = 0; first < seen; first += EXACT_KEYS) {
    const int64_t count = seen - first < EXACT_KEYS ? seen - first : EXACT_KEYS;
    if (first > 0 && first % EXACT_SPAN == 0) add_span(queries, lanes, E, own);
    const auto key = key_tile<T>(in.key, b, g, keys, first, count, in.D, own.keys);
    auto value = value_tile<T>(in.value, b, g, keys, first, count, in.E, own.values);
    gemm(count, lanes, steps, key.first, key.row, 1, own.queries, lanes, own.logits, lanes, false, in.scale);
    const bool partly = first + count > by_all;
    if (partly) hide_later(in, keys, first, count, first_query, lanes, own.logits);
    if (weigh_tile(count, lanes, own) && first > 0)
      for (int64_t i = 0; i < queries; i++)
        for (int64_t e = 0; e < E; e += W) store(own.out + i * E + e, load(own.out + i * E + e) * own.shrink[i]);
    if (partly) value = add_apart(in, b, g, keys, first, count, first_query, queries, lanes, value, own);
    gemm(queries, E, steps_of<Number<T>>(count), own.weights(), 1, lanes, value.first, value.row, own.out, E, true);
  }
  if (!one_span) add_span(queries, lanes, E, own);
  const float *highest = one_span ? own.highest : own.all_highest, *total = one_span ? own.total : own.all_total;
  float *out = one_span ? own.out : own.all_out;
  for (int64_t i = 0; i < queries; i++)
    write_query<T>(a, b, h, keys, first_query + i, highest[i], total[i], out + i * E);
}

template <class T>
static int64_t exact_forward_of(const ExactForward &a, void *workspace) {
  const ExactInputs &in = a.inputs;
  Arena arena{(char *)workspace};
  const Masks keys(arena, in.key_valid, in.B, in.M);
#if defined(SUBQUAD_AMX)
  if constexpr (Factor<T>::PAIRED) return exact_forward_by_amx(a, arena, keys);
#endif
  const PerThread<ExactScratch<T>> scratch(arena, in.threads, in);
  if (!arena.base) return arena.used;
  const int64_t tiles = (in.N + EXACT_QUERIES - 1) / EXACT_QUERIES;
  parallel_for(in.threads, in.B * in.H * tiles, [&](int64_t task, int thread) {
    const int64_t bh = task / tiles, tile = tiles - 1 - task % tiles;  // the last of a causal head take longest
    const int64_t b = bh / in.H;
    attend_exactly<T>(a, b, bh % in.H, tile * EXACT_QUERIES, keys.of(b), scratch.of[thread]);
  });
  return arena.used;
}

static int64_t exact_forward(const ExactForward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return exact_forward_of<decltype(x)>(a, workspace); });
}
