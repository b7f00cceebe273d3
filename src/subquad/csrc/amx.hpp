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

constexpr int64_t TILE_ROWS = W;  // of products: C needs no copy if its rows fill tiles, nor A if its depth does, too
constexpr int64_t TILE_NUMBERS = W * W;  // pairs, or floats

// Products need one on their thread, and no other inside it. A later owner of the tiles, such as a product of torch, makes
// settings of its own.
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

// The tiles of a matrix in memory: the distance from one to the next, down and to the right, and from row to row inside.
template <class Number>
struct Tiles {
  Number *first;
  int64_t down, right, row;
  Number *at(int64_t i, int64_t j) const { return first + i * down + j * right; }
  Tiles from(int64_t i, int64_t j) const { return {at(i, j), down, right, row}; }
};

// R × V tiles of C are the product, or get it added.
template <int R, int V>
static inline void tile_block(int64_t steps, const Tiles<const Pair> &a, const Tiles<const Pair> &b,
                              const Tiles<float> &c, bool add) {
  const int64_t a_row = a.row * sizeof(Pair), b_row = b.row * sizeof(Pair), c_row = c.row * sizeof(float);  // bytes
  if (add) {
    _tile_loadd(0, c.at(0, 0), c_row);
    if constexpr (V > 1) _tile_loadd(1, c.at(0, 1), c_row);
    if constexpr (R > 1) _tile_loadd(2, c.at(1, 0), c_row);
    if constexpr (R > 1 && V > 1) _tile_loadd(3, c.at(1, 1), c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
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

// C (rows × columns, in tiles) = A·B, or C += A·B.
static void multiply_tiles(int64_t rows, int64_t columns, int64_t steps, const Tiles<const Pair> &a, const Tiles<const Pair> &b,
                      const Tiles<float> &c, bool add) {
  __asm__ volatile("" ::: "memory");  // GCC does not know that loads of tiles read memory
  for (int64_t j = 0; j < columns; j += 2)
    for (int64_t i = 0; i < rows; i += 2) {
      const Tiles<const Pair> of = a.from(i, 0), by = b.from(0, j);
      const Tiles<float> to = c.from(i, j);
      if (i + 1 < rows && j + 1 < columns) tile_block<2, 2>(steps, of, by, to, add);
      else if (i + 1 < rows) tile_block<2, 1>(steps, of, by, to, add);
      else if (j + 1 < columns) tile_block<1, 2>(steps, of, by, to, add);
      else tile_block<1, 1>(steps, of, by, to, add);
    }
}

constexpr int64_t PANEL = 8 * W;  // pairs of a row of A that are copied at once
constexpr int64_t LEAST_FOR_TILES = 1 << 13;  // products; fewer are done before tiles are set up

static bool tiles_pay(int64_t rows, int64_t columns, int64_t depth) {
  return rows >= 4 && rows * columns * depth >= LEAST_FOR_TILES;
}

// Up to two tiles down of rows of A, `deep` pairs of each, with zeros where rows and pairs do not fill tiles.
static Tiles<const Pair> copy_panel(int64_t rows, int64_t deep, const Pair *a, int64_t a_row, int64_t a_step, Pair *to) {
  const int64_t row = round_up(deep, W);
  for (int64_t i = 0; i < rows; i += W)
    for (int64_t d = 0; d < deep; d += W) {
      const auto some = [](int64_t left) { return (__mmask16)(left < W ? (1 << left) - 1 : 0xffff); };
      const __mmask16 lanes = some(a_step == 1 ? deep - d : rows - i);
      vf block[W];
      UNROLL for (int r = 0; r < W; r++) {
        const bool there = a_step == 1 ? i + r < rows : d + r < deep;
        const Pair *from = a_step == 1 ? a + (i + r) * a_row + d : a + i * a_row + (d + r) * a_step;
        block[r] = there ? (vf)_mm512_maskz_loadu_epi32(lanes, from) : vf{};
      }
      if (a_step != 1) transpose(block);
      UNROLL for (int r = 0; r < W; r++) store((float *)to + (i + r) * row + d, block[r]);
    }
  return {to, W * row, W, row};
}

// As `gemm`; either the rows of A or its columns are next to each other.
static void gemm_by_tiles(int64_t rows, int64_t columns, int64_t depth, const Pair *a, int64_t a_row, int64_t a_step,
                          const Pair *b, int64_t b_row, float *c, int64_t c_row, bool add, float times) {
  const TilesInUse in_use;
  alignas(64) Pair panel[2 * W * PANEL], last_steps[W * 2 * W];
  alignas(64) float spare[2 * W * 2 * W];
  for (int64_t i = 0; i < rows; i += 2 * W) {
    const int64_t here = rows - i < 2 * W ? rows - i : 2 * W, down = (here + W - 1) / W;
    const bool whole = here % W == 0;
    for (int64_t first = 0; first < depth; first += PANEL) {
      const int64_t deep = depth - first < PANEL ? depth - first : PANEL, steps = deep / W, rest = deep % W;
      const Pair *from = a + i * a_row + first * a_step;
      const bool in_place = a_step == 1 && whole && rest == 0, more = add || first > 0;
      const Tiles<const Pair> of =
          in_place ? Tiles<const Pair>{from, W * a_row, W, a_row} : copy_panel(here, deep, from, a_row, a_step, panel);
      for (int64_t j = 0; j < columns; j += 2 * W) {
        const int64_t wide = columns - j < 2 * W ? columns - j : 2 * W;
        float *target = c + i * c_row + j;
        const Tiles<float> to = whole ? Tiles<float>{target, W * c_row, W, c_row} : Tiles<float>{spare, 2 * W * W, W, 2 * W};
        if (!whole && more)
          for (int64_t r = 0; r < here; r++)
            for (int64_t v = 0; v < wide; v += W) store(spare + r * 2 * W + v, load(target + r * c_row + v));
        const Pair *by = b + first * b_row + j;
        if (steps > 0) multiply_tiles(down, wide / W, steps, of, {by, W * b_row, W, b_row}, to, more);
        if (rest > 0) {
          for (int64_t d = 0; d < W; d++)
            for (int64_t v = 0; v < wide; v += W)
              store(last_steps + d * 2 * W + v, d < rest ? load(by + (steps * W + d) * b_row + v) : vu{});
          multiply_tiles(down, wide / W, 1, of.from(0, steps), {last_steps, 0, W, 2 * W}, to, more || steps > 0);
        }
        if (first + deep < depth ? whole : whole && times == 1) continue;
        const float by_times = first + deep < depth ? 1 : times;
        for (int64_t r = 0; r < here; r++)
          for (int64_t v = 0; v < wide; v += W) store(target + r * c_row + v, load(to.first + r * to.row + v) * by_times);
      }
    }
  }
}

#else
constexpr int64_t TILE_ROWS = 1;  // no tiles: any number of rows
#endif
