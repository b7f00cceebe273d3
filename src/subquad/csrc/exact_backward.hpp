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

struct ExactGradScratch {
  float *rows, *queries;          // (Q',D') the queries times the scale, and transposed (D,Q')
  float *grads, *grads_across;    // (Q',E') the gradients of their outputs, and transposed (E,Q')
  float *lse, *residual, *delta;  // (Q')
  float *weights, *slopes;        // (EXACT_KEYS,Q') p and s
  float *keys, *values;           // (EXACT_KEYS,D'), (EXACT_KEYS,E') where the caller's cannot be read in place
  float *of_queries;              // (Q',D')
  float *of_keys, *of_values;     // (slice,D'), (slice,E')

  ExactGradScratch(Arena &arena, const ExactInputs &in) {
    const int64_t D = round_up(in.D, W), E = round_up(in.E, W), Q = EXACT_QUERIES, slice = slice_of(in);
    rows = arena.take<float>(Q * D);
    queries = arena.take<float>(D * Q);
    grads = arena.take<float>(Q * E);
    grads_across = arena.take<float>(E * Q);
    lse = arena.take<float>(Q);
    residual = arena.take<float>(Q);
    delta = arena.take<float>(Q);
    weights = arena.take<float>(EXACT_KEYS * Q);
    slopes = arena.take<float>(EXACT_KEYS * Q);
    keys = arena.take<float>(EXACT_KEYS * D);
    values = arena.take<float>(EXACT_KEYS * E);
    of_queries = arena.take<float>(Q * D);
    of_keys = arena.take<float>(slice * D);
    of_values = arena.take<float>(slice * E);
  }
};

// Keys of one tile, as a task meets them.
struct KeyTile {
  int64_t first, count;  // among the valid keys
  TileRows keys, values;
  float *of_keys, *of_values;
};

// A tile of queries: `lanes` are `queries` filled up with zeros.
template <class T>
static void pack_query_tile(const ExactBackward &a, int64_t b, int64_t h, int64_t first, int64_t queries, int64_t lanes,
                            const Positions &keys, const ExactGradScratch &own) {
  const ExactInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), row = (b * in.H + h) * in.N + first;
  pack_rows<T>(in.query, b, h, nullptr, first, queries, in.D, own.rows, D);
  zero(own.rows + queries * D, (lanes - queries) * D);
  for (int64_t i = 0; i < queries * D; i += W) store(own.rows + i, load(own.rows + i) * in.scale);
  pack_transposed(own.rows, lanes, in.D, D, own.queries, lanes);
  zero(own.grads, lanes * E);
  for (int64_t i = 0; i < lanes; i++) {
    const bool none = i >= queries || seen_keys(in, keys, first + i) == 0;
    own.lse[i] = none ? __builtin_inff() : a.lse[row + i];  // weights of 0
    own.residual[i] = none ? 0 : a.residual[row + i];
    own.delta[i] = none || !a.grad_lse ? 0 : -a.grad_lse[row + i];
    if (none || !a.grad_out.data) continue;
    const T *grad = row_of<T>(a.grad_out, b, h, first + i), *out = row_of<T>(a.out, b, h, first + i);
    load_row(grad, in.E, own.grads + i * E, E);
    float total = 0;
    for (int64_t e = 0; e < in.E; e++) total += widen(grad[e]) * widen(out[e]);
    own.delta[i] += total;
  }
  pack_transposed(own.grads, lanes, in.E, E, own.grads_across, lanes);
}

// Weights and slopes of a tile of pairs, from their logits and products g·v.
static void weigh_pairs(int64_t count, int64_t lanes, const ExactGradScratch &own) {
  for (int64_t v = 0; v < lanes; v += W) {
    const vf lse = load(own.lse + v), residual = load(own.residual + v), delta = load(own.delta + v);
    for (int64_t j = 0; j < count; j++) {
      float *weight = own.weights + j * lanes + v, *slope = own.slopes + j * lanes + v;
      const vf p = exp_nonpositive((load(weight) - lse) - residual);
      store(weight, p);
      store(slope, p * (load(slope) - delta));
    }
  }
}

static bool rows_are_finite(const float *rows, int64_t row, int64_t count, int64_t width) {
  bool finite = true;
  for (int64_t i = 0; i < count; i++) finite &= is_finite(rows + i * row, width);
  return finite;
}

// The pairs of a tile one by one, those alone that meet: what is not finite may not reach others as 0·∞.
static void add_pairs(const ExactInputs &in, const Positions &keys, int64_t first_query, int64_t queries, int64_t lanes,
                      const KeyTile &tile, const ExactGradScratch &own) {
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W);
  for (int64_t j = 0; j < tile.count; j++) {
    const float *key = tile.keys.first + j * tile.keys.row;
    for (int64_t q = hidden_lanes(in, keys, tile.first + j, first_query); q < queries; q++) {
      const float weight = own.weights[j * lanes + q], slope = own.slopes[j * lanes + q];
      for (int64_t d = 0; d < in.D; d++) tile.of_keys[j * D + d] += slope * own.rows[q * D + d];
      for (int64_t d = 0; d < in.D; d++) own.of_queries[q * D + d] += slope * key[d];
      for (int64_t e = 0; e < in.E; e++) tile.of_values[j * E + e] += weight * own.grads[q * E + e];
    }
  }
}

// A tile of queries and a tile of keys: what both give each other.
static void add_tile(const ExactInputs &in, const Positions &keys, int64_t first_query, int64_t queries, int64_t lanes,
                     const KeyTile &tile, const ExactGradScratch &own) {
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), count = tile.count;
  gemm(count, lanes, in.D, tile.keys.first, tile.keys.row, 1, own.queries, lanes, own.weights, lanes, false);
  gemm(count, lanes, in.E, tile.values.first, tile.values.row, 1, own.grads_across, lanes, own.slopes, lanes, false);
  const bool partly = tile.first + count > seen_keys(in, keys, first_query);
  if (partly) hide_later(in, keys, tile.first, count, first_query, lanes, own.weights);
  weigh_pairs(count, lanes, own);
  if (partly && !(rows_are_finite(own.rows, D, queries, D) && rows_are_finite(own.grads, E, queries, E) &&
                  rows_are_finite(tile.keys.first, tile.keys.row, count, D) &&
                  rows_are_finite(own.slopes, lanes, count, lanes)))
    return add_pairs(in, keys, first_query, queries, lanes, tile, own);
  gemm(count, E, lanes, own.weights, lanes, 1, own.grads, E, tile.of_values, E, true);
  gemm(count, D, lanes, own.slopes, lanes, 1, own.rows, D, tile.of_keys, D, true);
  gemm(queries, D, count, own.slopes, 1, lanes, tile.keys.first, tile.keys.row, own.of_queries, D, true);
}

// Where what a query gets from a slice of keys is kept until all are there: (slices,B·H,N,D').
struct QueryShares {
  float *first;
  int64_t slices;

  float *of(const ExactInputs &in, int64_t slice, int64_t bh, int64_t query) const {
    return first + ((slice * in.B * in.H + bh) * in.N + query) * round_up(in.D, W);
  }
};

template <class T>
static void slice_gradients(const ExactBackward &a, int64_t b, int64_t g, int64_t slice, const Positions &keys,
                            const QueryShares &shares, const ExactGradScratch &own) {
  const ExactInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), E = round_up(in.E, W), length = slice_of(in), from = slice * length;
  const int64_t to = from + length < keys.count ? from + length : keys.count, group = in.H / in.G;
  zero(own.of_keys, length * D);
  zero(own.of_values, length * E);
  for (int64_t h = g * group; h < (g + 1) * group; h++)
    for (int64_t first = 0; first < in.N; first += EXACT_QUERIES) {
      const int64_t queries = in.N - first < EXACT_QUERIES ? in.N - first : EXACT_QUERIES, lanes = round_up(queries, W);
      int64_t end = seen_keys(in, keys, first + queries - 1);
      end = end < to ? end : to;
      zero(own.of_queries, queries * D);
      if (from < end) pack_query_tile<T>(a, b, h, first, queries, lanes, keys, own);
      for (int64_t at = from; at < end; at += EXACT_KEYS) {
        const int64_t count = end - at < EXACT_KEYS ? end - at : EXACT_KEYS;
        const KeyTile tile = {at, count, tile_rows<T>(in.key, b, g, keys, at, count, in.D, in.D == D, own.keys),
                              tile_rows<T>(in.value, b, g, keys, at, count, in.E, true, own.values),
                              own.of_keys + (at - from) * D, own.of_values + (at - from) * E};
        add_tile(in, keys, first, queries, lanes, tile, own);
      }
      for (int64_t i = 0; i < queries * D; i += W)
        store(shares.of(in, slice, b * in.H + h, first) + i, load(own.of_queries + i) * in.scale);
    }
  for (int64_t j = from; j < to; j++) {
    store_row(own.of_keys + (j - from) * D, in.D, row_of<T>(a.grad_key, b, g, keys[j]));
    store_row(own.of_values + (j - from) * E, in.E, row_of<T>(a.grad_value, b, g, keys[j]));
  }
}

template <class T>
static int64_t exact_backward_of(const ExactBackward &a, void *workspace) {
  const ExactInputs &in = a.inputs;
  Arena arena{(char *)workspace};
  const Masks valid(arena, in.key_valid, in.B, in.M);
  const PerThread<ExactGradScratch> scratch(arena, in.threads, in);
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
