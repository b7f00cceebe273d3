// What each rank of several does for clusters that hold tokens of all of them: sums over its own tokens, and which of the
// given codes or means these are nearest to. Padding has no part in a sum; its codes are 0, its labels are `clusters`.

// The mean of each head's valid vectors, and the sum of their squared distances to it.
template <class T>
static int64_t moments_of(const Moments &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks valid(arena, a.valid, a.B, a.N);
  const Pieces<double> squares = arena.take_each<double>(a.threads, a.D);
  if (!arena.base) return arena.used;
  parallel_for(a.threads, a.B * a.H, [&](int64_t bh, int thread) {
    const int64_t b = bh / a.H, h = bh % a.H;
    const Positions at = valid.of(b);
    double *mean = a.mean + bh * a.D, *own = squares[thread], total = 0;
    sum_rows<T>(a.x, b, h, at, 0, at.count, a.D, mean);
    for (int64_t d = 0; d < a.D; d++) mean[d] /= at.count > 0 ? (double)at.count : 1.0;
    for (int64_t d = 0; d < a.D; d++) own[d] = 0;
    for (int64_t i = 0; a.squares && i < at.count; i++) {
      const T *row = row_of<T>(a.x, b, h, at[i]);
      for (int64_t d = 0; d < a.D; d++) own[d] += (widen(row[d]) - mean[d]) * (widen(row[d]) - mean[d]);
    }
    for (int64_t d = 0; d < a.D; d++) total += own[d];
    if (a.squares) a.squares[bh] = total;
  });
  return arena.used;
}

static int64_t moments(const Moments &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return moments_of<decltype(x)>(a, workspace); });
}

struct CodingScratch {
  float *tile, *products;  // (HASH_TILE,width), (HASH_TILE,64)
  uint64_t *codes;         // (HASH_TILE)

  CodingScratch(Arena &arena, int64_t width) {
    tile = arena.take<float>(HASH_TILE * width);
    products = arena.take<float>(HASH_TILE * WORD);
    codes = arena.take<uint64_t>(HASH_TILE);
  }
};

// The codes of vectors in several tensors, side by side, each less its mean and times its factor.
template <class T>
static int64_t centred_codes_of(const Coding &a, void *workspace) {
  Arena arena{(char *)workspace};
  int64_t width = 0;
  for (const CodedTerm &term : a.terms) width += term.width;
  const int64_t heads = a.B * a.H;
  const Masks valid(arena, a.valid, a.B, a.N);
  const Pieces<float> planes = arena.take_each<float>(a.planes_head ? heads : 1, width * WORD);
  const PerThread<CodingScratch> scratch(arena, a.threads, width);
  if (!arena.base) return arena.used;
  for (int64_t bh = 0; bh < (a.planes_head ? heads : 1); bh++)
    transpose_planes(a.planes + bh * a.planes_head, a.bits, width, planes[bh]);
  parallel_for(a.threads, heads, [&](int64_t bh, int thread) {
    const int64_t b = bh / a.H, h = bh % a.H;
    const Positions at = valid.of(b);
    const CodingScratch &own = scratch.of[thread];
    int64_t *codes = a.codes + bh * a.N;
    for (int64_t i = 0; i < a.N; i++) codes[i] = 0;
    for (int64_t first = 0; first < at.count; first += HASH_TILE) {
      const int64_t count = at.count - first < HASH_TILE ? at.count - first : HASH_TILE;
      int64_t column = 0;
      for (const CodedTerm &term : a.terms) {
        const double *mean = term.mean + bh * term.width, factor = term.factor[bh];
        for (int64_t i = 0; i < count; i++) {
          const T *row = row_of<T>(term.x, b, h, at[first + i]);
          float *x = own.tile + i * width + column;
          for (int64_t d = 0; d < term.width; d++) x[d] = (float)((widen(row[d]) - mean[d]) * factor);
        }
        column += term.width;
      }
      gemm(count, WORD, width, own.tile, width, 1, planes[a.planes_head ? bh : 0], WORD, own.products, WORD, false);
      pack_signs(own.products, count, own.codes);
      for (int64_t i = 0; i < count; i++) codes[at[first + i]] = (int64_t)own.codes[i];
    }
  });
  return arena.used;
}

static int64_t centred_codes(const Coding &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return centred_codes_of<decltype(x)>(a, workspace); });
}

// A round of k-means on codes, without its centroids' update: the nearest centroid of each, and the votes of the members.
static int64_t assign_codes(const CodeAssignment &a, void *workspace) {
  Arena arena{(char *)workspace};
  const int64_t C = a.clusters;
  const Masks valid(arena, a.valid, a.B, a.N);
  const KmeansScratch scratch(arena, C, a.threads);
  const Pieces<uint64_t> codes = arena.take_each<uint64_t>(a.threads, a.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(a.threads, a.N, PAST);
  if (!arena.base) return arena.used;
  parallel_for(a.threads, a.B * a.H, [&](int64_t bh, int thread) {
    const Positions at = valid.of(bh / a.H);
    uint64_t *own = codes[thread], *centroids = scratch.centroids[thread];
    int32_t *found = labels[thread], *votes = a.votes + bh * C * WORD;
    for (int64_t c = 0; c < C; c++) centroids[c] = (uint64_t)a.centroids[bh * C + c] | PRESENT;
    for (int64_t i = 0; i < C * WORD; i++) votes[i] = 0;
    for (int64_t i = 0; i < at.count; i++) {
      own[i] = (uint64_t)a.codes[bh * a.N + at[i]] | PRESENT;
      found[i] = -1;
    }
    for (int64_t first = 0; first < at.count; first += KMEANS_BLOCK) {
      const int64_t count = at.count - first < KMEANS_BLOCK ? at.count - first : KMEANS_BLOCK;
      reassign(own + first, found + first, count, centroids, C, scratch.proposed[thread], scratch.changes[thread], votes);
    }
    for (int64_t i = 0; i < a.N; i++) a.labels[bh * a.N + i] = C;
    for (int64_t i = 0; i < at.count; i++) a.labels[bh * a.N + at[i]] = found[i];
  });
  return arena.used;
}

struct MeanScratch {
  float *rows, *products;  // (REFINE_TILE,D), (REFINE_TILE,C')
  int32_t *labels;         // (REFINE_TILE)

  MeanScratch(Arena &arena, int64_t D, int64_t lanes) {
    rows = arena.take<float>(REFINE_TILE * D);
    products = arena.take<float>(REFINE_TILE * lanes);
    labels = arena.take<int32_t>(REFINE_TILE);
  }
};

// For each vector x the cluster with the smallest half − (x − mean)·direction, the lowest of equal ones.
template <class T>
static int64_t assign_means_of(const MeanAssignment &a, void *workspace) {
  Arena arena{(char *)workspace};
  const int64_t C = a.clusters, D = a.D, lanes = round_up(C, W), heads = a.B * a.H;
  const Masks valid(arena, a.valid, a.B, a.N);
  const Pieces<float> directions = arena.take_each<float>(heads, D * lanes), halves = arena.take_each<float>(heads, lanes);
  const PerThread<MeanScratch> scratch(arena, a.threads, D, lanes);
  if (!arena.base) return arena.used;
  const Stage pack = {heads, [&](int64_t bh, int) {
    for (int64_t d = 0; d < D; d++)
      load_row(a.directions + (bh * D + d) * C, C, directions[bh] + d * lanes, lanes);
    load_row(a.halves + bh * C, C, halves[bh], lanes);
    for (int64_t c = C; c < lanes; c++) halves[bh][c] = __builtin_inff();
    for (int64_t i = 0; i < a.N; i++) a.labels[bh * a.N + i] = C;
  }};
  const int64_t blocks = (a.N + REFINE_BLOCK - 1) / REFINE_BLOCK;
  const Stage assign = {heads * blocks, [&](int64_t task, int thread) {
    const int64_t bh = task / blocks, b = bh / a.H, h = bh % a.H, start = task % blocks * REFINE_BLOCK;
    const Positions at = valid.of(b);
    const int64_t end = start + REFINE_BLOCK < at.count ? start + REFINE_BLOCK : at.count;
    const double *mean = a.mean + bh * D;
    const MeanScratch &own = scratch.of[thread];
    for (int64_t first = start; first < end; first += REFINE_TILE) {
      const int64_t count = end - first < REFINE_TILE ? end - first : REFINE_TILE;
      for (int64_t i = 0; i < count; i++) {
        const T *row = row_of<T>(a.x, b, h, at[first + i]);
        for (int64_t d = 0; d < D; d++) own.rows[i * D + d] = (float)(widen(row[d]) - mean[d]);
      }
      gemm(count, lanes, D, own.rows, D, 1, directions[bh], lanes, own.products, lanes, false);
      nearest_means(own.products, halves[bh], count, lanes, own.labels);
      for (int64_t i = 0; i < count; i++) a.labels[bh * a.N + at[first + i]] = own.labels[i];
    }
  }};
  parallel_stages(a.threads, pack, assign);
  return arena.used;
}

static int64_t assign_means(const MeanAssignment &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return assign_means_of<decltype(x)>(a, workspace); });
}

// The sum of each group's vectors, added up in fp64. A label outside of the groups is in none.
template <class T>
static int64_t group_sums_of(const GroupSums &a, void *workspace) {
  Arena arena{(char *)workspace};
  const int64_t C = a.groups, D = a.D;
  const Pieces<double> totals = arena.take_each<double>(a.threads, C * D);
  if (!arena.base) return arena.used;
  parallel_for(a.threads, a.B * a.H, [&](int64_t bh, int thread) {
    double *total = totals[thread];
    int64_t *sizes = a.sizes + bh * C;
    for (int64_t i = 0; i < C * D; i++) total[i] = 0;
    for (int64_t c = 0; c < C; c++) sizes[c] = 0;
    for (int64_t i = 0; i < a.N; i++) {
      const int64_t label = a.labels[bh * a.N + i];
      if ((uint64_t)label >= (uint64_t)C) continue;
      const T *row = row_of<T>(a.x, bh / a.H, bh % a.H, i);
      double *sum = total + label * D;
      sizes[label]++;
      for (int64_t d = 0; d < D; d++) sum[d] += widen(row[d]);
    }
    for (int64_t i = 0; i < C * D; i++) a.sums[bh * C * D + i] = (float)total[i];
  });
  return arena.used;
}

static int64_t group_sums(const GroupSums &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return group_sums_of<decltype(x)>(a, workspace); });
}
