// Small dense products on packed operands: C (rows × columns) = A·B, or C += A·B.
// A's element (r, d) is a[r * a_row + d * a_step], so that A may be read transposed; B and C are rows of whole vectors.
//
// A block of C stays in registers over the whole depth. For each d it takes one row of V vectors from B, and from A one
// number for each of its R rows:
//
//              d →        V·W columns
//          ┌────────┐    ┌───────────┐
//      R   │   A    │  · │     B     │ ↓ d
//          └────────┘    └───────────┘
//
// R and V fill the registers: R·V accumulators, V for B's row, one for A's number.
//
// Accumulators start at 0 every GEMM_DEPTH steps, and are then added to C. If they started at what C holds, each step
// would round a sum as large as C, and the error of a sum over many keys would grow with their number.

// In variants with products of bf16, A and B may hold pairs (`Pair`): a step of the depth is two numbers then. In the
// variant `amxbf16`, tiles multiply them (`amx.hpp`).

// The rows of B from some column on, packed or wherever they are.
template <class Number>
struct PackedRows {
  const Number *first;
  int64_t row;
  PackedRows from(int64_t column) const { return {first + column, row}; }
  const Number *operator[](int64_t d) const { return first + d * row; }
};
struct ListedRows {
  const float *const *rows;
  int64_t column = 0;
  ListedRows from(int64_t more) const { return {rows, column + more}; }
  const float *operator[](int64_t d) const { return rows[d] + column; }
};

// C, whose rows get `times` the product, or have it added.
struct Product {
  float *first;
  int64_t row;
  bool add;
  float times = 1;
  Product at(int64_t r, int64_t column) const { return {first + r * row + column, row, add, times}; }
};

constexpr int64_t GEMM_DEPTH = 128;

template <int R, int V, class Number, class B>
static inline void gemm_steps(int64_t from, int64_t to, const Number *a, int64_t a_row, int64_t a_step, B b, const Product &c) {
  vf acc[R][V] = {};
  for (int64_t d = from; d < to; d++) {
    decltype(load(a)) row[V];
    UNROLL for (int v = 0; v < V; v++) row[v] = load(b[d] + v * W);
    UNROLL for (int r = 0; r < R; r++) {
      const auto x = splat(a[r * a_row + d * a_step]);
      UNROLL for (int v = 0; v < V; v++) acc[r][v] = multiply_add(x, row[v], acc[r][v]);
    }
  }
  if (c.times != 1) {
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < V; v++) acc[r][v] *= c.times;
  }
  if (c.add) {
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < V; v++) acc[r][v] += load(c.first + r * c.row + v * W);
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(c.first + r * c.row + v * W, acc[r][v]);
}

template <int R, int V, class Number, class B>
static inline void gemm_block(int64_t depth, const Number *a, int64_t a_row, int64_t a_step, B b, Product c) {
  int64_t from = 0;
  for (; depth - from > GEMM_DEPTH; from += GEMM_DEPTH, c.add = true)
    gemm_steps<R, V>(from, from + GEMM_DEPTH, a, a_row, a_step, b, c);
  gemm_steps<R, V>(from, depth, a, a_row, a_step, b, c);
}

template <int V, class Number, class B>
static void gemm_rows(int64_t rows, int64_t depth, const Number *a, int64_t a_row, int64_t a_step, B b, Product c) {
  for (; rows >= GEMM_ROWS; rows -= GEMM_ROWS, a += GEMM_ROWS * a_row, c = c.at(GEMM_ROWS, 0))
    gemm_block<GEMM_ROWS, V>(depth, a, a_row, a_step, b, c);
  switch (rows) {
    case 1: return gemm_block<1, V>(depth, a, a_row, a_step, b, c);
    case 2: return gemm_block<2, V>(depth, a, a_row, a_step, b, c);
    case 3: return gemm_block<3, V>(depth, a, a_row, a_step, b, c);
    case 4: return gemm_block<4, V>(depth, a, a_row, a_step, b, c);
    case 5: return gemm_block<5, V>(depth, a, a_row, a_step, b, c);
  }
}

// `columns` is a multiple of W. Columns outside, rows inside: a strip of B stays in the cache for all rows of A. What is
// left of the columns takes narrower blocks; (… > n ? n : 1) only keeps blocks from being compiled that cannot occur.
template <class Number, class B>
static void gemm_with(int64_t rows, int64_t columns, int64_t depth, const Number *a, int64_t a_row, int64_t a_step, B b,
                      const Product &c) {
  int64_t column = 0;
  for (int64_t left = columns / W; left > 0; left -= GEMM_VECTORS, column += GEMM_VECTORS * W) {
    const Product to = c.at(0, column);
    if (left >= GEMM_VECTORS) gemm_rows<GEMM_VECTORS>(rows, depth, a, a_row, a_step, b.from(column), to);
    else if (left == 3) gemm_rows<(GEMM_VECTORS > 3 ? 3 : 1)>(rows, depth, a, a_row, a_step, b.from(column), to);
    else if (left == 2) gemm_rows<(GEMM_VECTORS > 2 ? 2 : 1)>(rows, depth, a, a_row, a_step, b.from(column), to);
    else gemm_rows<1>(rows, depth, a, a_row, a_step, b.from(column), to);
  }
}

template <class Number>
static void gemm(int64_t rows, int64_t columns, int64_t depth, const Number *a, int64_t a_row, int64_t a_step,
                 const Number *b, int64_t b_row, float *c, int64_t c_row, bool add, float times = 1) {
#if defined(SUBQUAD_AMX)
  if constexpr (__is_same(Number, Pair))
    if (tiles_pay(rows, columns, depth))
      return gemm_by_tiles(rows, columns, depth, a, a_row, a_step, b, b_row, c, c_row, add, times);
#endif
  gemm_with(rows, columns, depth, a, a_row, a_step, PackedRows<Number>{b, b_row}, Product{c, c_row, add, times});
}
