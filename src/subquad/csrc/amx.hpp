// Products of pairs of bf16 by AMX, in its tiles of 16 rows of 16 pairs or floats. Sums are floats, as in `gemm`.
//
//              16·steps pairs →     32 columns
//          ┌────────┬────────┐    ┌──────┬──────┐
//      32  │   A    │        │  · │  B   │      │ ↓ steps, 16 pairs deep each
//          ├────────┼────────┤    ├──────┼──────┤
//          │        │        │    └──────┴──────┘
//          └────────┴────────┘
//
// A block of C is four tiles, which stay in registers over the whole depth; two of A and two of B fill the other four.

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define SUBQUAD_AMX

constexpr int64_t TILE_NUMBERS = W * W;  // pairs, or floats

// Products need one on their thread. The next owner of the tiles, such as a product of torch, makes its own settings.
struct TilesInUse {
  TilesInUse() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } settings;
    static_assert(sizeof settings == 64);
    _tile_loadconfig(&settings);
  }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse &) = delete;
};

// Where the tiles of a matrix are: from one to the next, down and to the right, and from row to row inside.
template <class Number>
struct Tiles {
  Number *first;
  int64_t down, right, row;
  Number *at(int64_t i, int64_t j) const { return first + i * down + j * right; }
  Tiles from(int64_t i, int64_t j) const { return {at(i, j), down, right, row}; }
};

// R × V tiles of C get the product added.
template <int R, int V>
static inline void add_tile_block(int64_t steps, const Tiles<const Pair> &a, const Tiles<const Pair> &b,
                                  const Tiles<float> &c) {
  const int64_t a_row = a.row * sizeof(Pair), b_row = b.row * sizeof(Pair), c_row = c.row * sizeof(float);  // bytes
  _tile_loadd(0, c.at(0, 0), c_row);
  if constexpr (V > 1) _tile_loadd(1, c.at(0, 1), c_row);
  if constexpr (R > 1) _tile_loadd(2, c.at(1, 0), c_row);
  if constexpr (R > 1 && V > 1) _tile_loadd(3, c.at(1, 1), c_row);
  for (int64_t d = 0; d < steps; d++) {
    _tile_loadd(4, a.at(0, d), a_row);
    _tile_loadd(6, b.at(d, 0), b_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) _tile_loadd(5, a.at(1, d), a_row);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (V > 1) _tile_loadd(7, b.at(d, 1), b_row);
    if constexpr (V > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 1 && V > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c.at(0, 0), c_row);
  if constexpr (V > 1) _tile_stored(1, c.at(0, 1), c_row);
  if constexpr (R > 1) _tile_stored(2, c.at(1, 0), c_row);
  if constexpr (R > 1 && V > 1) _tile_stored(3, c.at(1, 1), c_row);
}

// C (rows × columns, in tiles) gets A·B added.
static void add_tiles(int64_t rows, int64_t columns, int64_t steps, const Tiles<const Pair> &a, const Tiles<const Pair> &b,
                      const Tiles<float> &c) {
  __asm__ volatile("" ::: "memory");  // GCC does not know that loads of tiles read memory
  for (int64_t j = 0; j < columns; j += 2)
    for (int64_t i = 0; i < rows; i += 2) {
      const auto of = a.from(i, 0), by = b.from(0, j);
      const auto to = c.from(i, j);
      if (i + 1 < rows && j + 1 < columns) add_tile_block<2, 2>(steps, of, by, to);
      else if (i + 1 < rows) add_tile_block<2, 1>(steps, of, by, to);
      else if (j + 1 < columns) add_tile_block<1, 2>(steps, of, by, to);
      else add_tile_block<1, 1>(steps, of, by, to);
    }
}

#endif
