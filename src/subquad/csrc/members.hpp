// What the clusters' members do: each attends to its cluster's top keys, which are packed once for all of them.
//
//     keys of a centroid    ├──── top K: mass m ────┼──── all others ────┤
//     out of a member     =  m · its own softmax     +  rest, the centroid's own attention to them, which all members share

constexpr int64_t MEMBER_TILE = 64;

struct MemberScratch {
  float *rows;            // (K',D' or E') for the transposition
  float *keys, *values;   // (D,K') transposed; (K,E')
  float *hidden;          // (K') 0 for a key, −∞ for the filling up to whole vectors
  float *queries;         // (MEMBER_TILE,D)
  float *weights;         // (MEMBER_TILE,K')
  float *out;             // (MEMBER_TILE,E')

  MemberScratch(Arena &arena, const ClusteredInputs &in) {
    const int64_t K = round_up(in.topk, W), D = round_up(in.D, W), E = round_up(in.E, W);
    rows = arena.take<float>(K * (D > E ? D : E));
    keys = arena.take<float>(D * K);
    values = arena.take<float>(K * E);
    hidden = arena.take<float>(K);
    queries = arena.take<float>(MEMBER_TILE * in.D);
    weights = arena.take<float>(MEMBER_TILE * K);
    out = arena.take<float>(MEMBER_TILE * E);
  }
};

// The rows of `count` keys by rank, packed: (count', width') with zeros to whole vectors both ways.
template <class T>
static void gather(const Rows &rows, int64_t b, int64_t g, const Positions &keys, const int32_t *ranks, int64_t count,
                   int64_t width, float *to, int64_t padded) {
  for (int64_t i = 0; i < count; i++) load_row(row_of<T>(rows, b, g, keys[ranks[i]]), width, to + i * padded, padded);
  zero(to + count * padded, (round_up(count, W) - count) * padded);
}

// Rows of logits·scale + hidden to their softmax. It is normalised before it weighs values, whose sums stay in fp32 then.
static void softmax_rows(float *rows, int64_t count, int64_t width, float scale, const float *hidden) {
  for (int64_t i = 0; i < count; i++) {
    float *row = rows + i * width;
    vf high = splat(-__builtin_inff()), total = {};
    for (int64_t j = 0; j < width; j += W) {
      vf logits = load(row + j) * scale + load(hidden + j);
      store(row + j, logits);
      high = maximum(logits, high);
    }
    const vf top = splat(highest(high));
    for (int64_t j = 0; j < width; j += W) {
      vf p = exp_nonpositive(load(row + j) - top);
      total += p;
      store(row + j, p);
    }
    const vf norm = splat(1 / sum(total));
    for (int64_t j = 0; j < width; j += W) store(row + j, load(row + j) * norm);
  }
}

// ln Σ e^(logit·scale + hidden) of a row: −∞ where all of them are −∞, and NaN where one of them is NaN.
static float row_lse(const float *row, int64_t width, float scale, const float *hidden) {
  vf high = splat(-__builtin_inff()), total = {};
  for (int64_t j = 0; j < width; j += W) high = maximum(load(row + j) * scale + load(hidden + j), high);
  const float top = highest(high), shift = top == -__builtin_inff() ? 0 : top;
  for (int64_t j = 0; j < width; j += W) total += exp_nonpositive(load(row + j) * scale + load(hidden + j) - shift);
  return shift + __builtin_logf(sum(total));
}

// The top keys of one cluster, packed for the products of all its members.
template <class T>
static void pack_top(const ClusteredForward &a, const Positions &keys, int64_t b, int64_t g, const int32_t *top, int64_t K,
                     const MemberScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t lanes = round_up(K, W), wide = round_up(in.D, W);
  gather<T>(in.key, b, g, keys, top, K, in.D, own.rows, wide);
  pack_transposed(own.rows, lanes, in.D, wide, own.keys, lanes);
  gather<T>(in.value, b, g, keys, top, K, in.E, own.values, round_up(in.E, W));
  for (int64_t j = 0; j < lanes; j++) own.hidden[j] = j < K ? 0 : -__builtin_inff();
}

// out_i = rest_c + mass_c · softmax(Q_i·K_topᵀ) V_top for the members of a cluster, whose top keys are packed. The top keys
// have mass_c of the whole weight, so that lse_i = ln Σ_top e^logit − ln mass_c.
template <class T>
static void attend_members(const ClusteredForward &a, int64_t b, int64_t h, const int32_t *members, int64_t size,
                           int64_t row, int64_t K, const MemberScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t lanes = round_up(K, W), width = round_up(in.E, W);
  const float *rest = a.saved.rest + row * in.E, mass = a.saved.mass[row];
  if (K == 0) {
    for (int64_t i = 0; i < size; i++) store_row(rest, in.E, row_of<T>(a.out, b, h, members[i]));
    return;
  }
  for (int64_t first = 0; first < size; first += MEMBER_TILE) {
    const int64_t count = size - first < MEMBER_TILE ? size - first : MEMBER_TILE;
    pack_rows<T>(in.query, b, h, members, first, count, in.D, own.queries, in.D);
    gemm(count, lanes, in.D, own.queries, in.D, 1, own.keys, lanes, own.weights, lanes, false);
    for (int64_t i = 0; a.query_lse && i < count; i++)
      a.query_lse[(b * in.H + h) * in.N + members[first + i]] =
          row_lse(own.weights + i * lanes, lanes, in.scale, own.hidden) - __builtin_logf(mass);
    softmax_rows(own.weights, count, lanes, in.scale, own.hidden);
    gemm(count, width, K, own.weights, lanes, 1, own.values, width, own.out, width, false);
    for (int64_t i = 0; i < count; i++) {
      float *out = own.out + i * width;
      for (int64_t e = 0; e < in.E; e++) out[e] = rest[e] + mass * out[e];
      store_row(out, in.E, row_of<T>(a.out, b, h, members[first + i]));
    }
  }
}

// Σ e^{logit − highest} V can leave fp32 where the values do not. Then the rest is summed up in normalised weights, key by
// key; where values are not finite, it stays as it is.
template <class T>
static void rest_by_weights(const ClusteredForward &a, const Positions &keys, int64_t b, int64_t g, int64_t row, int64_t K,
                            const Merged &merged, const MergeScratch &merging, const MemberScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const float *centroid = a.saved.centroids + row * in.D;
  float *rest = a.saved.rest + row * in.E;
  bool finite = true;
  for (int64_t e = 0; e < in.E; e++) finite &= __builtin_isfinite(rest[e]);
  if (finite || !__builtin_isfinite(merged.total)) return;
  zero(merging.out, in.E);
  const int32_t *top = a.saved.top + row * in.topk, *end = top + K;
  for (int64_t rank = 0; rank < keys.count; rank++) {
    load_row(row_of<T>(in.value, b, g, keys[rank]), in.E, own.out, in.E);
    for (int64_t e = 0; e < in.E; e++)
      if (!__builtin_isfinite(own.out[e])) return;
    if (top < end && *top == rank) {  // the top keys ascend
      top++;
      continue;
    }
    load_row(row_of<T>(in.key, b, g, keys[rank]), in.D, own.queries, in.D);
    float logit = 0;
    for (int64_t d = 0; d < in.D; d++) logit += own.queries[d] * (centroid[d] * in.scale);
    const float weight = __builtin_expf(logit - merged.highest) / merged.total;
    for (int64_t e = 0; e < in.E; e++) merging.out[e] += weight * own.out[e];
  }
  for (int64_t e = 0; e < in.E; e++) rest[e] = merging.out[e];
}

// Everything that one cluster does once the keys' chunks are done.
template <class T>
static void finish_cluster(const ClusteredForward &a, const Positions &keys, int64_t b, int64_t h, int64_t c,
                           const ChunkResults &results, const MergeScratch &merging, const MemberScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t bh = b * in.H + h, row = bh * in.clusters + c, K = in.topk < keys.count ? in.topk : keys.count;
  const int32_t *bounds = a.saved.offsets + bh * (in.clusters + 1) + c;
  const int32_t *members = a.saved.order + bh * in.N + bounds[0];
  attend_nothing(a, row);
  if (keys.count > 0) {
    const Merged merged = merge_chunks(a, keys.count, row, results, merging);
    // Without members too: a centroid of zeros has a NaN among its logits where a key is infinite.
    if (bounds[0] == bounds[1]) return void(a.saved.lse[row] += 0 * merged.total);
    const int64_t g = h / (in.H / in.G);
    if (K) pack_top<T>(a, keys, b, g, a.saved.top + row * in.topk, K, own);
    split_off_top(a, row, merged, own.values, results.width, merging);
    rest_by_weights<T>(a, keys, b, g, row, K, merged, merging, own);
  }
  const int64_t size = bounds[1] - bounds[0];
  if (a.query_lse && K == 0)  // the centroid's, or without keys none
    for (int64_t i = 0; i < size; i++)
      a.query_lse[bh * in.N + members[i]] = keys.count > 0 ? a.saved.lse[row] : -__builtin_inff();
  attend_members<T>(a, b, h, members, size, row, K, own);
}
