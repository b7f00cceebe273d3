// The nearest of some means to each query, in the space of the logits; see `query_clusters.hpp` for what is near there.
//
// Queries and means are taken less the middle of the means, and divided by the largest number among these.

struct NearestScratch {
  float *middle;             // (D') of the means of clusters with members
  float *means, *transposed;  // (C',D'), (D',C')
  float *mapped, *halves;    // (D',C'), (C') as in RefineScratch
  float *rows, *scores;      // (REFINE_TILE,D'), (REFINE_TILE,C')
  int32_t *labels;           // (REFINE_TILE)

  NearestScratch(Arena &arena, const NearestMeans &a) {
    const int64_t lanes = round_up(a.clusters, W), wide = round_up(a.D, W);
    middle = arena.take<float>(wide);
    means = arena.take<float>(lanes * wide);
    transposed = arena.take<float>(wide * lanes);
    mapped = arena.take<float>(wide * lanes);
    halves = arena.take<float>(lanes);
    rows = arena.take<float>(REFINE_TILE * wide);
    scores = arena.take<float>(REFINE_TILE * lanes);
    labels = arena.take<int32_t>(REFINE_TILE);
  }
};

// The means of one head as the metric sees them. Returns what queries are multiplied by; 0 where no cluster has members.
static float prepare_nearest(const NearestMeans &a, int64_t bh, const float *metric, const NearestScratch &own) {
  const int64_t C = a.clusters, D = a.D, lanes = round_up(C, W), wide = round_up(D, W);
  const float *means = a.means + bh * C * D;
  const int64_t *sizes = a.sizes + bh * C;
  int64_t present = 0;
  zero(own.middle, wide);
  for (int64_t c = 0; c < C; c++) {
    if (sizes[c] == 0) continue;
    present++;
    for (int64_t d = 0; d < D; d++) own.middle[d] += means[c * D + d];
  }
  if (present == 0) return 0;
  for (int64_t d = 0; d < D; d++) own.middle[d] /= (float)present;
  zero(own.means, lanes * wide);
  vf highs = {};
  for (int64_t c = 0; c < C; c++) {
    if (sizes[c] == 0) continue;
    float *row = own.means + c * wide;
    for (int64_t d = 0; d < D; d++) row[d] = means[c * D + d] - own.middle[d];
    for (int64_t d = 0; d < wide; d += W) highs = maximum(maximum(load(row + d), -load(row + d)), highs);
  }
  const float largest = highest(highs), norm = largest > 0 ? 1 / largest : 1;
  for (int64_t i = 0; i < lanes * wide; i += W) store(own.means + i, load(own.means + i) * norm);
  pack_transposed(own.means, lanes, D, wide, own.transposed, lanes);
  gemm(D, lanes, D, metric, wide, 1, own.transposed, lanes, own.mapped, lanes, false);
  for (int64_t c = 0; c < lanes; c++) own.halves[c] = 0;
  for (int64_t d = 0; d < D; d++)
    for (int64_t c = 0; c < lanes; c++) own.halves[c] += own.transposed[d * lanes + c] * own.mapped[d * lanes + c];
  for (int64_t c = 0; c < lanes; c++)
    own.halves[c] = c >= C || sizes[c] == 0 ? __builtin_inff() : own.halves[c] / 2;
  return norm;
}

template <class T>
static void nearest_of_head(const NearestMeans &a, int64_t b, int64_t h, const Positions &queries, const float *metric,
                            const NearestScratch &own) {
  const int64_t bh = b * a.H + h, D = a.D, lanes = round_up(a.clusters, W), wide = round_up(D, W);
  int64_t *out = a.labels + bh * a.N;
  for (int64_t i = 0; i < a.N; i++) out[i] = a.clusters;
  const float norm = prepare_nearest(a, bh, metric, own);
  if (norm == 0) return;
  for (int64_t first = 0; first < queries.count; first += REFINE_TILE) {
    const int64_t count = queries.count - first < REFINE_TILE ? queries.count - first : REFINE_TILE;
    for (int64_t i = 0; i < count; i++) {
      float *row = own.rows + i * wide;
      load_row(row_of<T>(a.query, b, h, queries[first + i]), D, row, wide);
      for (int64_t d = 0; d < wide; d += W) store(row + d, (load(row + d) - load(own.middle + d)) * norm);
    }
    gemm(count, lanes, D, own.rows, wide, 1, own.mapped, lanes, own.scores, lanes, false);
    nearest_means(own.scores, own.halves, count, lanes, own.labels);
    for (int64_t i = 0; i < count; i++) out[queries[first + i]] = own.labels[i];
  }
}

template <class T>
static int64_t nearest_clusters_of(const NearestMeans &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks queries(arena, a.query_valid, a.B, a.N), keys(arena, a.key_valid, a.B, a.M);
  const Pieces<float> metrics = arena.take_each<float>(a.B * a.G, Space::metric_size(a.D));
  const PerThread<SpaceScratch> measuring(arena, a.threads, a.M, a.D);
  const Pieces<float> planes = arena.take_each<float>(a.threads, a.D * WORD);
  const PerThread<NearestScratch> scratch(arena, a.threads, a);
  if (!arena.base) return arena.used;
  const Stage measure = {a.B * a.G, [&](int64_t bg, int thread) {
    const Space space = {metrics[bg], planes[thread]};
    space_of_logits<T>(a.key, bg / a.G, bg % a.G, keys.of(bg / a.G), a.D, nullptr, 0, measuring.of[thread], space);
  }};
  const Stage assign = {a.B * a.H, [&](int64_t bh, int thread) {
    const int64_t b = bh / a.H, h = bh % a.H;
    nearest_of_head<T>(a, b, h, queries.of(b), metrics[b * a.G + h / (a.H / a.G)], scratch.of[thread]);
  }};
  parallel_stages(a.threads, measure, assign);
  return arena.used;
}

static int64_t nearest_clusters(const NearestMeans &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return nearest_clusters_of<decltype(x)>(a, workspace); });
}
