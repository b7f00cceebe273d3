// The gradients of exact attention. With g and γ the gradients of a query's output and log-sum-exp:
//
//     p_ij = e^{logit_ij − lse_i}                     the weights again, tile by tile as in the forward pass
//     s_ij = p_ij · (g_i·v_j − δ_i),  δ_i = g_i·out_i − γ_i
//     ∂v_j = Σ_i p_ij g_i      ∂k_j = scale · Σ_i s_ij q_i      ∂q_i = scale · Σ_j s_ij k_j
//
// A task has some keys of one key head, and all queries of its heads in their order: what a key gets is added up there.
// What a query gets from each task is added afterwards, in the order of the keys. How many keys a task has follows from
// M alone, so that results do not depend on the number of threads.

constexpr int64_t LEAST_SLICE = 1024, SLICES = 8;

// Keys of a task: whole tiles.
static int64_t slice_of(const ExactInputs &in) {
  const int64_t even = round_up((in.M + SLICES - 1) / SLICES, EXACT_KEYS), least = round_up(LEAST_SLICE, EXACT_KEYS);
  return even > least ? even : least;
}

template <class T>
struct ExactGradScratch {
  Number<T> *rows;                        // (Q',D' or E') before they are turned
  Number<T> *queries, *queries_across;    // (Q',D'), (D,Q'): over queries, and over their components
  Number<T> *grads, *grads_across;        // (Q',E'), (E,Q') the gradients of their outputs
  float *lse, *residual, *delta;          // (Q')
  float *weights, *slopes;                // (EXACT_KEYS,Q') p and s
  Number<T> *of_lanes, *slopes_of_lanes;  // (EXACT_KEYS,Q') p and s where the depth runs over queries
  Number<T> *slopes_of_keys;              // (EXACT_KEYS,Q') s where it runs over keys
  Number<T> *keys, *key_steps, *values;   // (EXACT_KEYS,D' or E') where the caller's cannot be read in place
  float *row;                             // (D' or E')
  float *of_queries;                      // (Q',D')
  float *of_keys, *of_values;             // (slice,D'), (slice,E')

  ExactGradScratch(Arena &arena, const ExactInputs &in) {
    const int64_t D = round_up(in.D, W), E = round_up(in.E, W), most = D > E ? D : E, Q = EXACT_QUERIES;
    const int64_t tile = EXACT_KEYS * Q, paired = Factor<T>::PAIRED ? tile / 2 : 0;
    rows = arena.take<Number<T>>(Q * most);
    queries = arena.take<Number<T>>(Q * D);
    queries_across = arena.take<Number<T>>(D * Q);
    grads = arena.take<Number<T>>(Q * E);
    grads_across = arena.take<Number<T>>(E * Q);
    lse = arena.take<float>(Q);
    residual = arena.take<float>(Q);
    delta = arena.take<float>(Q);
    weights = arena.take<float>(tile);
    slopes = arena.take<float>(tile);
    of_lanes = arena.take<Number<T>>(paired);
    slopes_of_lanes = arena.take<Number<T>>(paired);
    slopes_of_keys = arena.take<Number<T>>(paired);
    keys = arena.take<Number<T>>(EXACT_KEYS * D);
    key_steps = arena.take<Number<T>>(EXACT_KEYS * D);
    values = arena.take<Number<T>>(EXACT_KEYS * E);
    row = arena.take<float>(most);
    of_queries = arena.take<float>(Q * D);
    of_keys = arena.take<float>(slice_of(in) * D);
    of_values = arena.take<float>(slice_of(in) * E);
    if constexpr (!Factor<T>::PAIRED) {
      of_lanes = weights;
      slopes_of_lanes = slopes_of_keys = slopes;
    }
  }
};

// Queries of a tile, filled up: pairs of neighbours are made of two vectors.
template <class T>
static int64_t grad_lanes(int64_t queries) {
  return round_up(queries, Factor<T>::PAIRED ? 2 * W : W);
}

// Keys of one tile, as a task meets them.
template <class T>
struct KeyTile {
  int64_t b, g, first, count;  // among the valid keys
  TileRows<Number<T>> keys, steps, values;
  float *of_keys, *of_values;
};

// Rows of a tile for products over their components and over the rows; `lanes` are filled up with zeros.
template <class T>
static void pack_both_ways(const Rows &from, int64_t b, int64_t h, int64_t first, int64_t count, int64_t lanes,
                           int64_t width, Number<T> *steps, Number<T> *across, const ExactGradScratch<T> &own) {
  const int64_t wide = round_up(width, W), depth = steps_of<Number<T>>(width), padded = round_up(depth, W);
  pack_factor_rows<T>(from, b, h, nullptr, first, count, width, own.rows, padded);
  for (int64_t i = count * padded; i < lanes * padded; i++) own.rows[i] = {};
  pack_factors_across(own.rows, lanes, depth, padded, across, lanes);
  pack_factor_steps<T>(from, b, h, nullptr, first, count, width, steps, wide);
  for (int64_t i = steps_of<Number<T>>(count) * wide; i < steps_of<Number<T>>(lanes) * wide; i++) steps[i] = {};
}

// Row `i` of such rows set to 0, both ways: of padding, which may hold what is not finite.
template <class Number>
static void clear_row(int64_t i, int64_t lanes, int64_t width, Number *steps, Number *across) {
  zero_row(steps, i, round_up(width, W));
  for (int64_t d = 0; d < steps_of<Number>(width); d++) across[d * lanes + i] = {};
}

template <class T>
static void pack_query_tile(const ExactBackward &a, int64_t b, int64_t h, int64_t first, int64_t queries, int64_t lanes,
                            const Positions &keys, const ExactGradScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const int64_t E = round_up(in.E, W), row = (b * in.H + h) * in.N + first;
  pack_both_ways<T>(in.query, b, h, first, queries, lanes, in.D, own.queries, own.queries_across, own);
  if (a.grad_out.data) {
    pack_both_ways<T>(a.grad_out, b, h, first, queries, lanes, in.E, own.grads, own.grads_across, own);
  } else {
    for (int64_t i = 0; i < lanes * E; i++) own.grads[i] = own.grads_across[i] = {};
  }
  for (int64_t i = 0; i < queries; i++) {
    if (!is_padding(in, b, first + i, 1)) continue;
    clear_row<Number<T>>(i, lanes, in.D, own.queries, own.queries_across);
    clear_row<Number<T>>(i, lanes, in.E, own.grads, own.grads_across);
  }
  for (int64_t i = 0; i < lanes; i++) {
    const bool none = i >= queries || !meets_keys(in, b, keys, first + i);
    own.lse[i] = none ? __builtin_inff() : a.lse[row + i];  // weights of 0
    own.residual[i] = none ? 0 : a.residual[row + i];
    own.delta[i] = none || !a.grad_lse ? 0 : -a.grad_lse[row + i];
    if (none || !a.grad_out.data) continue;
    const T *grad = row_of<T>(a.grad_out, b, h, first + i), *out = row_of<T>(a.out, b, h, first + i);
    float total = 0;
    for (int64_t e = 0; e < in.E; e++) total += widen(grad[e]) * widen(out[e]);
    own.delta[i] += total;
  }
}

// Weights and slopes of a tile of pairs, from their logits and products g·v.
template <class T>
static void weigh_pairs(int64_t count, int64_t lanes, const ExactGradScratch<T> &own) {
  for (int64_t v = 0; v < lanes; v += W) {
    const vf lse = load(own.lse + v), residual = load(own.residual + v), delta = load(own.delta + v);
    for (int64_t j = 0; j < count; j++) {
      float *weight = own.weights + j * lanes + v, *slope = own.slopes + j * lanes + v;
      const vf p = exp_nonpositive((load(weight) - lse) - residual);
      store(weight, p);
      store(slope, p * (load(slope) - delta));
    }
  }
  if constexpr (Factor<T>::PAIRED) {
    for (int64_t j = 0; j < count; j++)
      for (int64_t v = 0; v < lanes; v += 2 * W) {
        store(own.of_lanes + (j * lanes + v) / 2, paired_neighbours(own.weights + j * lanes + v));
        store(own.slopes_of_lanes + (j * lanes + v) / 2, paired_neighbours(own.slopes + j * lanes + v));
      }
    for (int64_t j = 0; j < count; j += 2)
      for (int64_t v = 0; v < lanes; v += W) {
        const float *slope = own.slopes + j * lanes + v;
        store(own.slopes_of_keys + j / 2 * lanes + v, paired(load(slope), j + 1 < count ? load(slope + lanes) : vf{}));
      }
  }
}

template <class T>
static bool rows_are_finite(const Rows &rows, int64_t b, int64_t h, const int32_t *positions, const uint8_t *valid,
                            int64_t first, int64_t count, int64_t width, float *row) {
  bool finite = true;
  for (int64_t i = first; i < first + count; i++) {
    if (valid && !valid[i]) continue;
    load_row(row_of<T>(rows, b, h, positions ? positions[i] : i), width, row, round_up(width, W));
    finite &= is_finite(row, width);
  }
  return finite;
}

// Whether the products may go over pairs that do not meet, whose weights and slopes are 0.
template <class T>
static bool all_finite(const ExactBackward &a, const Positions &keys, int64_t h, int64_t first_query, int64_t queries,
                       int64_t lanes, const KeyTile<T> &tile, const ExactGradScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const uint8_t *valid = in.query_valid ? in.query_valid + tile.b * in.N : nullptr;
  auto of_queries = [&](const Rows &rows, int64_t width) {
    return !rows.data || rows_are_finite<T>(rows, tile.b, h, nullptr, valid, first_query, queries, width, own.row);
  };
  bool finite = of_queries(in.query, in.D) && of_queries(a.grad_out, in.E) &&
                rows_are_finite<T>(in.key, tile.b, tile.g, keys.at, nullptr, tile.first, tile.count, in.D, own.row);
  for (int64_t j = 0; j < tile.count; j++) finite &= is_finite(own.slopes + j * lanes, lanes);
  return finite;
}

// The pairs of a tile one by one, those alone that meet: what is not finite may not reach others as 0·∞.
template <class T>
static void add_pairs(const ExactBackward &a, const Positions &keys, int64_t h, int64_t first_query, int64_t queries,
                      int64_t lanes, const KeyTile<T> &tile, const ExactGradScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W);
  for (int64_t j = 0; j < tile.count; j++) {
    const T *key = row_of<T>(in.key, tile.b, tile.g, keys[tile.first + j]);
    for (int64_t q = hidden_lanes(in, keys, tile.first + j, first_query); q < queries; q++) {
      if (is_padding(in, tile.b, first_query + q, 1)) continue;
      const float weight = own.weights[j * lanes + q], slope = own.slopes[j * lanes + q];
      const T *query = row_of<T>(in.query, tile.b, h, first_query + q);
      const T *grad = a.grad_out.data ? row_of<T>(a.grad_out, tile.b, h, first_query + q) : nullptr;
      for (int64_t d = 0; d < in.D; d++) tile.of_keys[j * D + d] += slope * widen(query[d]);
      for (int64_t d = 0; d < in.D; d++) own.of_queries[q * D + d] += slope * widen(key[d]);
      for (int64_t e = 0; grad && e < in.E; e++) tile.of_values[j * E + e] += weight * widen(grad[e]);
    }
  }
}

// A tile of queries and a tile of keys: what both give each other.
template <class T>
static void add_tile(const ExactBackward &a, const Positions &keys, int64_t h, int64_t first_query, int64_t queries,
                     int64_t lanes, const KeyTile<T> &tile, const ExactGradScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), count = tile.count, over = steps_of<Number<T>>(lanes);
  gemm(count, lanes, steps_of<Number<T>>(in.D), tile.keys.first, tile.keys.row, 1, own.queries_across, lanes, own.weights,
       lanes, false, in.scale);
  gemm(count, lanes, steps_of<Number<T>>(in.E), tile.values.first, tile.values.row, 1, own.grads_across, lanes,
       own.slopes, lanes, false);
  const bool partly = tile.first + count > seen_keys(in, keys, first_query);
  if (partly) hide_later(in, keys, tile.first, count, first_query, lanes, own.weights);
  weigh_pairs(count, lanes, own);
  if (partly && !all_finite(a, keys, h, first_query, queries, lanes, tile, own))
    return add_pairs(a, keys, h, first_query, queries, lanes, tile, own);
  gemm(count, E, over, own.of_lanes, over, 1, own.grads, E, tile.of_values, E, true);
  gemm(count, D, over, own.slopes_of_lanes, over, 1, own.queries, D, tile.of_keys, D, true);
  gemm(queries, D, steps_of<Number<T>>(count), own.slopes_of_keys, 1, lanes, tile.steps.first, tile.steps.row,
       own.of_queries, D, true);
}

// Storage of each query's share from a slice of keys, until all are there: (slices,B·H,N,D').
struct QueryShares {
  float *first;
  int64_t slices;

  float *of(const ExactInputs &in, int64_t slice, int64_t bh, int64_t query) const {
    return first + ((slice * in.B * in.H + bh) * in.N + query) * round_up(in.D, W);
  }
};

template <class T>
static void slice_gradients(const ExactBackward &a, int64_t b, int64_t g, int64_t slice, const Positions &keys,
                            const QueryShares &shares, const ExactGradScratch<T> &own) {
  const ExactInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), length = slice_of(in), from = slice * length;
  const int64_t to = from + length < keys.count ? from + length : keys.count, group = in.H / in.G;
  zero(own.of_keys, length * D);
  zero(own.of_values, length * E);
  for (int64_t h = g * group; h < (g + 1) * group; h++)
    for (int64_t first = 0; first < in.N; first += EXACT_QUERIES) {
      const int64_t queries = in.N - first < EXACT_QUERIES ? in.N - first : EXACT_QUERIES;
      const int64_t lanes = grad_lanes<T>(queries);
      int64_t end = seen_keys(in, keys, first + queries - 1);
      end = is_padding(in, b, first, queries) ? 0 : end < to ? end : to;
      zero(own.of_queries, queries * D);
      if (from < end) pack_query_tile<T>(a, b, h, first, queries, lanes, keys, own);
      for (int64_t at = from; at < end; at += EXACT_KEYS) {
        const int64_t count = end - at < EXACT_KEYS ? end - at : EXACT_KEYS;
        const KeyTile<T> tile = {b, g, at, count, key_tile<T>(in.key, b, g, keys, at, count, in.D, own.keys),
                                 value_tile<T>(in.key, b, g, keys, at, count, in.D, own.key_steps),
                                 key_tile<T>(in.value, b, g, keys, at, count, in.E, own.values),
                                 own.of_keys + (at - from) * D, own.of_values + (at - from) * E};
        add_tile(a, keys, h, first, queries, lanes, tile, own);
      }
      for (int64_t i = 0; i < queries * D; i += W)
        store(shares.of(in, slice, b * in.H + h, first) + i, load(own.of_queries + i) * in.scale);
    }
  for (int64_t j = from; j < to; j++) {
    scale_row(own.of_keys + (j - from) * D, D, in.scale);
    store_row(own.of_keys + (j - from) * D, in.D, row_of<T>(a.grad_key, b, g, keys[j]));
    store_row(own.of_values + (j - from) * E, in.E, row_of<T>(a.grad_value, b, g, keys[j]));
  }
}

template <class T>
static int64_t exact_backward_of(const ExactBackward &a, void *workspace) {
  const ExactInputs &in = a.inputs;
  Arena arena{(char *)workspace};
  const Masks valid(arena, in.key_valid, in.B, in.M);
  const PerThread<ExactGradScratch<T>> scratch(arena, in.threads, in);
  const int64_t slices = (in.M + slice_of(in) - 1) / slice_of(in), D = round_up(in.D, W);
  const QueryShares shares = {arena.take<float>(slices * in.B * in.H * in.N * D), slices};
  if (!arena.base) return arena.used;
  const Stage hidden = {in.key_valid ? in.B * in.G : 0, [&](int64_t bg, int) {
    const int64_t b = bg / in.G, g = bg % in.G;
    for (int64_t j = 0; j < in.M; j++) {
      if (in.key_valid[b * in.M + j]) continue;
      for (int64_t d = 0; d < in.D; d++) narrow(0.0f, row_of<T>(a.grad_key, b, g, j) + d);
      for (int64_t e = 0; e < in.E; e++) narrow(0.0f, row_of<T>(a.grad_value, b, g, j) + e);
    }
  }};
  const Stage of_slices = {in.B * in.G * slices, [&](int64_t task, int thread) {
    const int64_t bg = task / slices, b = bg / in.G;
    slice_gradients<T>(a, b, bg % in.G, task % slices, valid.of(b), shares, scratch.of[thread]);
  }};
  const int64_t blocks = (in.N + EXACT_QUERIES - 1) / EXACT_QUERIES;
  const Stage of_queries = {in.B * in.H * blocks, [&](int64_t task, int) {
    const int64_t bh = task / blocks, first = task % blocks * EXACT_QUERIES;
    for (int64_t i = first; i < first + EXACT_QUERIES && i < in.N; i++) {
      if (slices == 0) {
        for (int64_t d = 0; d < in.D; d++) narrow(0.0f, row_of<T>(a.grad_query, bh / in.H, bh % in.H, i) + d);
        continue;
      }
      float *row = shares.of(in, 0, bh, i);
      for (int64_t slice = 1; slice < slices; slice++)
        for (int64_t d = 0; d < D; d += W) store(row + d, load(row + d) + load(shares.of(in, slice, bh, i) + d));
      store_row(row, in.D, row_of<T>(a.grad_query, bh / in.H, bh % in.H, i));
    }
  }};
  parallel_stages(in.threads, hidden, of_slices, of_queries);
  return arena.used;
}

static int64_t exact_backward(const ExactBackward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return exact_backward_of<decltype(x)>(a, workspace); });
}
