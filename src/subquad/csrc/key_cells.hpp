// Cells of keys: k-means of the sign hashes of [(k − mean k)/σ_k, (v − mean v)/σ_v].

struct CellScratch {
  double *mean, *squares;  // (D + E)
  float *tile, *products;  // (HASH_TILE,D + E), (HASH_TILE,64)

  CellScratch(Arena &arena, int64_t width) {
    mean = arena.take<double>(width);
    squares = arena.take<double>(width);
    tile = arena.take<float>(HASH_TILE * width);
    products = arena.take<float>(HASH_TILE * WORD);
  }
};

// The mean of the rows, and one standard deviation for all their components; 1 where all rows are equal.
template <class T>
static double spread_of(const Rows &rows, int64_t b, int64_t g, const Positions &at, int64_t width, double *mean,
                        double *squares) {
  sum_rows<T>(rows, b, g, at, 0, at.count, width, mean);
  for (int64_t d = 0; d < width; d++) mean[d] /= at.count > 0 ? (double)at.count : 1.0;
  for (int64_t d = 0; d < width; d++) squares[d] = 0;
  for (int64_t i = 0; i < at.count; i++) {
    const T *row = row_of<T>(rows, b, g, at[i]);
    for (int64_t d = 0; d < width; d++) squares[d] += (widen(row[d]) - mean[d]) * (widen(row[d]) - mean[d]);
  }
  double all = 0;
  for (int64_t d = 0; d < width; d++) all += squares[d];
  return all > 0 ? __builtin_sqrt(all / (double)(at.count * width)) : 1.0;
}

template <class T>
static void cells_of_head(const KeyCells &a, const Positions &keys, int64_t b, int64_t g, const float *planes,
                          const CellScratch &own, const KmeansScratch &kmeans, int thread, uint64_t *codes,
                          int32_t *labels) {
  const int64_t width = a.D + a.E;
  if (keys.count > a.cells) {
    const double of_keys = 1 / spread_of<T>(a.key, b, g, keys, a.D, own.mean, own.squares);
    const double of_values = 1 / spread_of<T>(a.value, b, g, keys, a.E, own.mean + a.D, own.squares);
    for (int64_t first = 0; first < keys.count; first += HASH_TILE) {
      const int64_t count = keys.count - first < HASH_TILE ? keys.count - first : HASH_TILE;
      for (int64_t i = 0; i < count; i++) {
        const T *key = row_of<T>(a.key, b, g, keys[first + i]), *value = row_of<T>(a.value, b, g, keys[first + i]);
        float *x = own.tile + i * width;
        for (int64_t d = 0; d < a.D; d++) x[d] = (float)((widen(key[d]) - own.mean[d]) * of_keys);
        for (int64_t e = 0; e < a.E; e++) x[a.D + e] = (float)((widen(value[e]) - own.mean[a.D + e]) * of_values);
      }
      gemm(count, WORD, width, own.tile, width, 1, planes, WORD, own.products, WORD, false);
      pack_signs(own.products, count, codes + first);
    }
  }
  kmeans_head(codes, keys.count, a.cells, a.iterations, kmeans, 1, thread, labels);
  int64_t *out = a.labels + (b * a.G + g) * a.M;
  for (int64_t i = 0; i < a.M; i++) out[i] = a.cells;
  for (int64_t i = 0; i < keys.count; i++) out[keys[i]] = labels[i];
}

template <class T>
static int64_t key_cells_of(const KeyCells &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks keys(arena, a.valid, a.B, a.M);
  const int64_t heads = a.B * a.G, width = a.D + a.E;
  float *planes = arena.take<float>(width * WORD);
  const PerThread<CellScratch> scratch(arena, a.threads, width);
  const KmeansScratch kmeans(arena, a.cells, a.threads);
  const Pieces<uint64_t> codes = arena.take_each<uint64_t>(heads, a.M, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(heads, a.M, PAST);
  if (!arena.base) return arena.used;
  transpose_planes(a.planes, a.bits, width, planes);
  parallel_for(a.threads, heads, [&](int64_t bg, int thread) {
    const int64_t b = bg / a.G;
    cells_of_head<T>(a, keys.of(b), b, bg % a.G, planes, scratch.of[thread], kmeans, thread, codes[bg], labels[bg]);
  });
  return arena.used;
}

static int64_t key_cells(const KeyCells &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return key_cells_of<decltype(x)>(a, workspace); });
}
