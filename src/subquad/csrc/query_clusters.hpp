// Clusters of queries: k-means of sign hashes, then a few rounds on the vectors themselves, in one of two spaces:
//
//     queries   x = q − mean q
//     logits    x L with L Lᵀ = Σ + ε, the covariance of the keys: vectors are near where their logits are alike
//
// No x L is formed. The hash multiplies x by the planes L·w, and with means c the nearest one has the smallest
//
//     ½ ‖xL − cL‖² − ½ ‖xL‖²  =  ½ cᵀ(Σ + ε)c − xᵀ(Σ + ε)c
//
// Variants that multiply pairs of bf16 round x and (Σ + ε)c to bf16 for the products, if the queries are bf16 and many:
// of a few, each that joins another cluster for a rounding shows in the output, and nothing is gained.

constexpr int64_t REFINE_BLOCK = 512;  // queries of a task
constexpr int64_t REFINE_TILE = 64;    // queries of a product, a multiple of four
constexpr int64_t MANY = 1024;         // queries from which on products take bf16
constexpr double JITTER = 1e-4;        // as in the reference

// The space of one key head: Σ + ε (D,D') with rows of whole vectors, and the planes (D,64) that hash in it.
struct Space {
  float *metric, *planes;

  static int64_t metric_size(int64_t D) { return D * round_up(D, W); }
};

struct SpaceScratch {
  double *mean, *covariance, *factor;  // (D), (D,D), (D,D)
  float *rows, *products;              // (M,D'), (D',D')

  SpaceScratch(Arena &arena, int64_t M, int64_t D) {
    const int64_t wide = round_up(D, W);
    mean = arena.take<double>(D);
    covariance = arena.take<double>(D * D);
    factor = arena.take<double>(D * D);
    rows = arena.take<float>(M * wide);
    products = arena.take<float>(wide * wide);
  }
};

// The rows at these positions less their mean, divided by the largest number among them: squares cannot overflow. Packed,
// `padded` floats each.
template <class T>
static void scaled_rows(const Rows &rows, int64_t b, int64_t h, const Positions &at, int64_t D, double *mean, float *to,
                        int64_t padded) {
  for (int64_t d = 0; d < D; d++) mean[d] = 0;
  for (int64_t first = 0; first < at.count; first += MEAN_BLOCK) {
    const int64_t end = first + MEAN_BLOCK < at.count ? first + MEAN_BLOCK : at.count;
    add_rows<T>(rows, b, h, at, first, end, D, mean);
  }
  for (int64_t d = 0; d < D; d++) mean[d] /= at.count > 0 ? (double)at.count : 1.0;
  vf highs = {};
  for (int64_t i = 0; i < at.count; i++) {
    const T *row = row_of<T>(rows, b, h, at[i]);
    float *x = to + i * padded;
    for (int64_t d = 0; d < D; d++) x[d] = (float)(widen(row[d]) - mean[d]);
    for (int64_t d = D; d < padded; d++) x[d] = 0;
    for (int64_t d = 0; d < padded; d += W) highs = maximum(maximum(load(x + d), -load(x + d)), highs);
  }
  const float largest = highest(highs), norm = largest > 0 ? 1 / largest : 1;
  for (int64_t i = 0; i < at.count * padded; i += W) store(to + i, load(to + i) * norm);
}

// Lower triangle with `factor`·`factor`ᵀ = `matrix`, which ε has made positive definite; NaN stays NaN.
static void cholesky(const double *matrix, int64_t D, double *factor) {
  for (int64_t i = 0; i < D; i++)
    for (int64_t j = 0; j < D; j++) {
      double x = j > i ? 0 : matrix[i * D + j];
      for (int64_t d = 0; d < j && j <= i; d++) x -= factor[i * D + d] * factor[j * D + d];
      factor[i * D + j] = j > i ? 0 : i == j ? __builtin_sqrt(x) : x / factor[j * D + j];
    }
}

// The space of the logits of one key head.
template <class T>
static void space_of_logits(const Rows &key, int64_t b, int64_t g, const Positions &keys, int64_t D, const float *planes,
                            int64_t bits, const SpaceScratch &own, const Space &to) {
  const int64_t wide = round_up(D, W);
  scaled_rows<T>(key, b, g, keys, D, own.mean, own.rows, wide);
  for (int64_t i = 0; i < D * D; i++) own.covariance[i] = 0;
  for (int64_t block = 0; block < keys.count; block += MEAN_BLOCK) {  // fp32 within a block, fp64 over the blocks
    const int64_t end = block + MEAN_BLOCK < keys.count ? block + MEAN_BLOCK : keys.count;
    const float *rows = own.rows + block * wide;
    gemm(D, wide, end - block, rows, 1, wide, rows, wide, own.products, wide, false);
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) own.covariance[i * D + j] += own.products[i * wide + j];
  }
  double mean = 0;
  for (int64_t i = 0; i < D * D; i++) own.covariance[i] /= keys.count > 0 ? (double)keys.count : 1.0;
  for (int64_t d = 0; d < D; d++) mean += own.covariance[d * D + d] / (double)D;
  for (int64_t d = 0; d < D; d++) own.covariance[d * D + d] += mean > 0 ? JITTER * mean : 1.0;
  cholesky(own.covariance, D, own.factor);
  zero(to.metric, D * wide);
  for (int64_t i = 0; i < D; i++)
    for (int64_t j = 0; j < D; j++) to.metric[i * wide + j] = (float)own.covariance[i * D + j];
  for (int64_t d = 0; d < D; d++)
    for (int64_t bit = 0; bit < WORD; bit++) {
      double x = 0;
      for (int64_t j = 0; j <= d && bit < bits; j++) x += own.factor[d * D + j] * planes[bit * D + j];
      to.planes[d * WORD + bit] = (float)x;
    }
}

static void space_of_queries(int64_t D, const float *planes, int64_t bits, const Space &to) {
  const int64_t wide = round_up(D, W);
  zero(to.metric, D * wide);
  for (int64_t d = 0; d < D; d++) {
    to.metric[d * wide + d] = 1;
    for (int64_t bit = 0; bit < WORD; bit++) to.planes[d * WORD + bit] = bit < bits ? planes[bit * D + d] : 0;
  }
}

// What the rounds of one head need; a head in flight has one. `Number` is what the products take.
template <class Number>
struct RefineScratch {
  static constexpr bool PAIRED = __is_same(Number, Pair);
  float *rows;               // (N,D') the queries, centred and scaled
  Number *factors;           // (N,F) the same, as products take them
  int32_t *order, *offsets;  // (N), (C+1)
  float *means;              // (C',D') of the rows; 0 for an empty cluster
  float *transposed;         // (D',C')
  float *mapped;             // (D,C') the metric times the means
  Number *directions;        // (steps,C') the same, as products take them
  float *halves;             // (C') ½ cᵀ metric c; infinity for an empty cluster, which is nobody's nearest
  double *mean;              // (D)
  int64_t row;               // F, numbers from one of the factors to the next

  RefineScratch(Arena &arena, int64_t N, int64_t C, int64_t D) {
    const int64_t lanes = round_up(C, W), wide = round_up(D, W), steps = steps_of<Number>(D);
    rows = arena.take<float>(N * wide);
    row = PAIRED ? steps : wide;
    factors = PAIRED ? arena.take<Number>(N * row) : (Number *)rows;
    order = arena.take<int32_t>(N);
    offsets = arena.take<int32_t>(C + 1);
    means = arena.take<float>(lanes * wide);
    transposed = arena.take<float>(wide * lanes);
    mapped = arena.take<float>(wide * lanes);
    directions = PAIRED ? arena.take<Number>(steps * lanes) : (Number *)mapped;
    halves = arena.take<float>(lanes);
    mean = arena.take<double>(D);
  }
};

// For each row of scores the lane with the smallest half − score, the lowest of equal ones. Four rows at once, because each
// step of a row waits for the one before it. The lanes of W rows are then compared in one go, transposed. What is behind
// the last row is read and not used.
static void nearest_means(const float *scores, const float *halves, int64_t count, int64_t lanes, int32_t *labels) {
  constexpr int ROWS = 4;
  vi ramp;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane;
  for (int64_t first = 0; first < count; first += W) {
    vf least[W], numbers[W];
    for (int64_t four = 0; four < W; four += ROWS) {
      const float *rows = scores + (first + four) * lanes;
      vf best[ROWS];
      vi at[ROWS];
      UNROLL for (int r = 0; r < ROWS; r++) {
        best[r] = splat(__builtin_inff());
        at[r] = ramp;
      }
      for (int64_t v = 0; v < lanes; v += W) {
        const vf half = load(halves + v);
        const vi lane = ramp + (int32_t)v;
        UNROLL for (int r = 0; r < ROWS; r++) {
          const vf distance = half - load(rows + r * lanes + v);
          const vi nearer = distance < best[r];
          best[r] = select(nearer, distance, best[r]);
          at[r] = select(nearer, lane, at[r]);
        }
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        least[four + r] = best[r];
        numbers[four + r] = (vf)at[r];
      }
    }
    transpose(least);
    transpose(numbers);
    vf nearest = least[0];
    vi label = (vi)numbers[0];
    for (int i = 1; i < W; i++) {
      const vi number = (vi)numbers[i], nearer = (least[i] < nearest) | ((least[i] == nearest) & (number < label));
      nearest = select(nearer, least[i], nearest);
      label = select(nearer, number, label);
    }
    for (int64_t i = 0; i < W && first + i < count; i++) labels[first + i] = label[i];
  }
}

// Codes of the rows [first, end), multiplied by the planes of a space.
static void hash_rows(const float *rows, int64_t first, int64_t end, int64_t D, const float *planes, float *products,
                      uint64_t *codes) {
  const int64_t wide = round_up(D, W);
  for (; first < end; first += HASH_TILE) {
    const int64_t count = end - first < HASH_TILE ? end - first : HASH_TILE;
    gemm(count, WORD, D, rows + first * wide, wide, 1, planes, WORD, products, WORD, false);
    pack_signs(products, count, codes + first);
  }
}

// The means of the clusters that the labels make, as the metric sees them.
template <class Number>
static void measure_means(int64_t D, int64_t C, const Space &space, const RefineScratch<Number> &own) {
  const int64_t lanes = round_up(C, W), wide = round_up(D, W);
  pack_transposed(own.means, lanes, D, wide, own.transposed, lanes);
  gemm(D, lanes, D, space.metric, wide, 1, own.transposed, lanes, own.mapped, lanes, false);
  for (int64_t c = 0; c < lanes; c++) own.halves[c] = 0;
  for (int64_t d = 0; d < D; d++)
    for (int64_t c = 0; c < lanes; c++) own.halves[c] += own.transposed[d * lanes + c] * own.mapped[d * lanes + c];
  for (int64_t c = 0; c < lanes; c++) {
    const bool empty = c >= C || own.offsets[c] == own.offsets[c + 1];
    own.halves[c] = empty ? __builtin_inff() : own.halves[c] / 2;
  }
  if constexpr (RefineScratch<Number>::PAIRED)
    for (int64_t d = 0; d < D; d += 2)
      for (int64_t c = 0; c < lanes; c += W) {
        const float *low = own.mapped + d * lanes + c;
        store(own.directions + d / 2 * lanes + c, paired(load(low), d + 1 < D ? load(low + lanes) : vf{}));
      }
}

static int64_t clusters_of(const QueryClusters &a, int64_t b) {
  if (!a.counts || a.counts[b] > a.clusters) return a.clusters;
  return a.counts[b] > 1 ? a.counts[b] : 1;
}

// Labels of one head's valid queries, by rank. `threads` > 1 splits the sequence.
template <class T>
static void cluster_queries(const QueryClusters &a, int64_t b, int64_t h, const Positions &queries, const Space &space,
                            const RefineScratch<Number<T>> &own, const Pieces<float> &scores,
                            const KmeansScratch &kmeans, int threads, int thread, uint64_t *codes, int32_t *labels) {
  const int64_t n = queries.count, C = clusters_of(a, b), D = a.D, lanes = round_up(C, W), wide = round_up(D, W);
  const int64_t steps = steps_of<Number<T>>(D);
  const Positions ranks{nullptr, n};
  auto in_blocks = [&](auto &&run) {
    parallel_for(threads, (n + REFINE_BLOCK - 1) / REFINE_BLOCK, [&](int64_t block, int of_team) {
      const int64_t first = block * REFINE_BLOCK, end = first + REFINE_BLOCK < n ? first + REFINE_BLOCK : n;
      run(first, end, scores[threads > 1 ? of_team : thread]);
    });
  };
  if (n > C) {
    scaled_rows<T>(a.query, b, h, queries, D, own.mean, own.rows, wide);
    in_blocks([&](int64_t first, int64_t end, float *products) {
      hash_rows(own.rows, first, end, D, space.planes, products, codes);
    });
  }
  kmeans_head(codes, n, C, a.iterations, kmeans, threads, thread, labels);
  if (n <= C) return;
  if constexpr (Factor<T>::PAIRED)
    if (n >= MANY) in_blocks([&](int64_t first, int64_t end, float *) {
      for (int64_t i = first; i < end; i++) round_row(own.rows + i * wide, D, own.factors + i * own.row, steps);
    });
  zero(own.means + C * wide, (lanes - C) * wide);
  for (int64_t round = 0; round < a.refine; round++) {
    sort_by_label(labels, ranks, C, own.order, own.offsets);
    parallel_for(threads, C, [&](int64_t c, int) {
      const int64_t size = own.offsets[c + 1] - own.offsets[c];
      float *mean = own.means + c * wide;
      zero(mean, wide);
      for (int64_t i = own.offsets[c]; i < own.offsets[c + 1]; i++)
        for (int64_t d = 0; d < wide; d++) mean[d] += own.rows[own.order[i] * wide + d];
      for (int64_t d = 0; d < wide; d++) mean[d] /= size > 0 ? (float)size : 1.0f;
    });
    measure_means(D, C, space, own);
    in_blocks([&](int64_t first, int64_t end, float *products) {
      for (; first < end; first += REFINE_TILE) {
        const int64_t count = end - first < REFINE_TILE ? end - first : REFINE_TILE;
        if (n < MANY) gemm(count, lanes, D, own.rows + first * wide, wide, 1, own.mapped, lanes, products, lanes, false);
        else gemm(count, lanes, steps, own.factors + first * own.row, own.row, 1, own.directions, lanes, products, lanes, false);
        nearest_means(products, own.halves, count, lanes, labels + first);
      }
    });
  }
}

template <class T>
static int64_t query_clusters_of(const QueryClusters &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks queries(arena, a.query_valid, a.B, a.N), keys(arena, a.key_valid, a.B, a.M);
  const bool one_item = a.key.batch == 0 && !a.key_valid;  // all items have the same keys
  const int64_t heads = a.B * a.H, spaces = !a.logits ? 1 : one_item ? a.G : a.B * a.G;
  const KmeansScratch kmeans(arena, a.clusters, a.threads);
  const Pieces<uint64_t> codes = arena.take_each<uint64_t>(heads, a.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(heads, a.N, PAST);
  const Pieces<float> metrics = arena.take_each<float>(spaces, Space::metric_size(a.D));
  const Pieces<float> planes = arena.take_each<float>(spaces, a.D * WORD);
  const PerThread<SpaceScratch> measuring(arena, a.threads, a.logits ? a.M : 0, a.D);
  const PerThread<RefineScratch<Number<T>>> refining(arena, a.threads, a.N, a.clusters, a.D);
  const int64_t lanes = round_up(a.clusters, W);
  const Pieces<float> scores = arena.take_each<float>(a.threads, REFINE_TILE * (lanes > WORD ? lanes : WORD));
  if (!arena.base) return arena.used;

  auto space = [&](int64_t b, int64_t g) {
    const int64_t at = !a.logits ? 0 : one_item ? g : b * a.G + g;
    return Space{metrics[at], planes[at]};
  };
  auto cluster = [&](int64_t bh, int threads, int thread) {
    const int64_t b = bh / a.H, h = bh % a.H;
    const Positions valid = queries.of(b);
    cluster_queries<T>(a, b, h, valid, space(b, h / (a.H / a.G)), refining.of[threads > 1 ? 0 : thread], scores, kmeans,
                       threads, thread, codes[bh], labels[bh]);
    int64_t *out = a.labels + bh * a.N;
    for (int64_t i = 0; i < a.N; i++) out[i] = a.clusters;
    for (int64_t i = 0; i < valid.count; i++) out[valid[i]] = labels[bh][i];
  };
  const Stage measure = {spaces, [&](int64_t at, int thread) {
    const int64_t b = at / a.G, g = at % a.G;
    if (a.logits) space_of_logits<T>(a.key, b, g, keys.of(b), a.D, a.planes, a.bits, measuring.of[thread], space(b, g));
    else space_of_queries(a.D, a.planes, a.bits, space(0, 0));
  }};
  const bool side_by_side = heads_side_by_side(heads, a.threads);
  const Stage clusters = {side_by_side ? heads : 0, [&](int64_t bh, int thread) { cluster(bh, 1, thread); }};
  parallel_stages(a.threads, measure, clusters);
  for (int64_t bh = 0; !side_by_side && bh < heads; bh++) cluster(bh, a.threads, 0);
  return arena.used;
}

static int64_t query_clusters(const QueryClusters &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return query_clusters_of<decltype(x)>(a, workspace); });
}
