// Sign hashes of vectors, centred or as they are.

constexpr int64_t MEAN_BLOCK = 1024;  // rows per sum, fixed so that results do not depend on the threads
constexpr int64_t HASH_TILE = 64;     // rows per product
constexpr int64_t WORD = 64;          // bits of a code

// Planes (bits,D) as (D,64), the unused bits 0.
static void transpose_planes(const float *from, int64_t bits, int64_t D, float *to) {
  for (int64_t d = 0; d < D; d++)
    for (int64_t bit = 0; bit < WORD; bit++) to[d * WORD + bit] = bit < bits ? from[bit * D + d] : 0;
}

struct HashScratch {
  Pieces<double> sums;     // a head: (blocks,D)
  Pieces<double> mean;     // a head: (D)
  float *planes;           // (D,64) transposed, the unused bits 0
  Pieces<float> tile;      // a thread: (64,D) centred rows
  Pieces<float> products;  // a thread: (64,64)
  int64_t blocks;

  HashScratch(Arena &arena, int64_t heads, int64_t N, int64_t D, int64_t threads) {
    blocks = (N + MEAN_BLOCK - 1) / MEAN_BLOCK;
    sums = arena.take_each<double>(heads, blocks * D);
    mean = arena.take_each<double>(heads, D);
    planes = arena.take<float>(D * WORD);
    tile = arena.take_each<float>(threads, HASH_TILE * D);
    products = arena.take_each<float>(threads, HASH_TILE * WORD);
  }

  void set_planes(const float *from, int64_t bits, int64_t D) { transpose_planes(from, bits, D, planes); }
};

// One word for each row of products with the planes. The unused planes are 0, so their bits are too.
static void pack_signs(const float *products, int64_t count, uint64_t *codes) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t code = 0;
    for (int64_t v = 0; v < WORD; v += W)
      code |= (uint64_t)bits_greater(load(products + i * WORD + v), vf{}) << v;
    codes[i] = code;
  }
}

// In fp64, as the reference does: the order of the sum, which padding may change, must not turn a bit of the hash.
template <class T>
static void add_rows(const Rows &rows, int64_t b, int64_t h, const Positions &positions, int64_t first, int64_t last,
                     int64_t D, double *total) {
  for (int64_t i = first; i < last; i++) {
    const T *row = row_of<T>(rows, b, h, positions[i]);
    for (int64_t d = 0; d < D; d++) total[d] += widen(row[d]);
  }
}

template <class T>
static void sum_rows(const Rows &rows, int64_t b, int64_t h, const Positions &positions, int64_t first, int64_t last,
                     int64_t D, double *total) {
  for (int64_t d = 0; d < D; d++) total[d] = 0;
  add_rows<T>(rows, b, h, positions, first, last, D, total);
}

template <class T>
static void hash_tile(const Rows &rows, int64_t b, int64_t h, const Positions &positions, int64_t first, int64_t last,
                      int64_t D, const double *mean, const float *planes, float *tile, float *products,
                      uint64_t *codes) {
  for (int64_t i = first; i < last; i++) {
    const T *row = row_of<T>(rows, b, h, positions[i]);
    float *centred = tile + (i - first) * D;
    for (int64_t d = 0; d < D; d++) centred[d] = (float)(widen(row[d]) - mean[d]);
  }
  gemm(last - first, WORD, D, tile, D, 1, planes, WORD, products, WORD, false);
  pack_signs(products, last - first, codes + first);
}

// The codes of one head's valid queries, by rank. `threads` > 1 splits the sequence.
template <class T>
static void hash_head(const Rows &rows, int64_t b, int64_t h, int64_t H, int64_t D, const Positions &positions,
                      const HashScratch &scratch, bool centre, int threads, int thread, uint64_t *codes) {
  const int64_t bh = b * H + h, n = positions.count, blocks = (n + MEAN_BLOCK - 1) / MEAN_BLOCK;
  double *sums = scratch.sums[bh], *mean = scratch.mean[bh];
  parallel_for(threads, centre ? blocks : 0, [&](int64_t block, int) {
    int64_t last = block * MEAN_BLOCK + MEAN_BLOCK;
    sum_rows<T>(rows, b, h, positions, block * MEAN_BLOCK, last < n ? last : n, D, sums + block * D);
  });
  for (int64_t d = 0; d < D; d++) {
    mean[d] = 0;
    for (int64_t block = 0; centre && block < blocks; block++) mean[d] += sums[block * D + d];
    mean[d] /= n > 0 ? n : 1;
  }
  parallel_for(threads, blocks, [&](int64_t block, int of_team) {
    int64_t own = threads > 1 ? of_team : thread, end = block * MEAN_BLOCK + MEAN_BLOCK;
    end = end < n ? end : n;
    for (int64_t first = block * MEAN_BLOCK; first < end; first += HASH_TILE)
      hash_tile<T>(rows, b, h, positions, first, first + HASH_TILE < end ? first + HASH_TILE : end, D, mean,
                   scratch.planes, scratch.tile[own], scratch.products[own], codes);
  });
}
