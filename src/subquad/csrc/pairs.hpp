// What products of rows of T multiply: floats; or pairs of bf16 (`Pair`), where T is bf16 and the variant multiplies those.
// A product's sums are floats in both. Weights, means and cells, which are computed in fp32, are rounded to bf16 for it.

template <class T>
struct Factor {
  using Number = float;
  static constexpr bool PAIRED = false;
};
template <class T>
using Number = typename Factor<T>::Number;

template <class Number>
struct TileRows {
  const Number *first;
  int64_t row;
};

vu paired(vf low, vf high);                 // lane by lane the pair of both
vu paired_neighbours(vf first, vf second);  // of 2·W numbers in a row the pairs of neighbours
static inline vu paired_neighbours(const float *row) { return paired_neighbours(load(row), load(row + W)); }

#if defined(SUBQUAD_PAIRS)
template <>
struct Factor<bf16> {
  using Number = Pair;
  static constexpr bool PAIRED = true;
};
#endif

#if defined(__AVX512BF16__)
inline vu paired(vf low, vf high) {
  const __m512i turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                        20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vu)_mm512_permutexvar_epi16(turn, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
inline vu paired_neighbours(vf first, vf second) {
  return (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
// Of W numbers of two rows the pairs of those above each other.
static inline vu paired_rows(const bf16 *low, const bf16 *high) {
  const __m512i under = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)low));
  const __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high));
  return (vu)_mm512_or_si512(under, _mm512_slli_epi32(upper, 16));
}
#elif defined(SUBQUAD_PAIRS)
static inline vu zipped(uint16x4_t low, uint16x4_t high) {
  return (vu)vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
}
inline vu paired(vf low, vf high) {
  return zipped((uint16x4_t)vcvt_bf16_f32((float32x4_t)low), (uint16x4_t)vcvt_bf16_f32((float32x4_t)high));
}
inline vu paired_neighbours(vf first, vf second) {
  return (vu)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
}
static inline vu paired_rows(const bf16 *low, const bf16 *high) {
  return zipped(vld1_u16(&low->bits), vld1_u16(&high->bits));
}
#endif

#if defined(__AVX512BF16__)
// 2^t for weights that are rounded to bf16: to 3e-6. 0 for −∞, denormal below 2⁻¹²⁶; NaN stays NaN.
static inline vf power_of_two(vf t) {
  const vf f = (vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1)
  vf p = splat(0.013534179f) * f + 0.052011493f;
  p = p * f + 0.24144269f;
  p = p * f + 0.69300386f;
  p = p * f + 1.0000026f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)t);
}
#endif

// 2^−SHRUNK · eˣ for x ≤ 0, with a relative error of at most 3e-6 for weights that are rounded to bf16. The sums of the
// weights have that error too, and with them the log-sum-exp.
template <class Number>
static inline vf weight_of(vf x) {
#if defined(__AVX512BF16__)
  if constexpr (__is_same(Number, Pair)) return power_of_two(x * 1.44269504f - (float)SHRUNK);
#endif
  return exp_nonpositive<SHRUNK>(x);
}

// How many numbers a product's depth has where the inputs have `depth`.
template <class Number>
static int64_t steps_of(int64_t depth) {
  return __is_same(Number, Pair) ? (depth + 1) / 2 : depth;
}

static inline Pair pair_of(uint32_t low, uint32_t high) { return {low | high << 16}; }

// A row's numbers in pairs of neighbours, then zeros up to `padded` pairs. A pair's low half comes first in memory, as in
// all processors that multiply pairs.
static inline void load_pairs(const bf16 *from, int64_t width, Pair *to, int64_t padded) {
  __builtin_memcpy(to, from, width / 2 * sizeof(Pair));
  if (width % 2) to[width / 2] = pair_of(from[width - 1].bits, 0);
  for (int64_t i = (width + 1) / 2; i < padded; i++) to[i].bits = 0;
}

// Two rows in pairs of what is above each other, then zeros up to `padded` pairs; `high` null: one row, and zeros.
static inline void load_rows_paired(const bf16 *low, const bf16 *high, int64_t width, Pair *to, int64_t padded) {
  int64_t d = 0;
#if defined(SUBQUAD_PAIRS)
  for (; high && d + W <= width; d += W) store(to + d, paired_rows(low + d, high + d));
#endif
  for (; d < width; d++) to[d] = pair_of(low[d].bits, high ? high[d].bits : 0);
  for (; d < padded; d++) to[d].bits = 0;
}

// The numbers of W pairs: those at even places and those at odd ones; a bf16 number is the upper half of a float.
static inline void split_pairs(vu pairs, vf &even, vf &odd) {
  even = (vf)(pairs << 16);
  odd = (vf)(pairs & 0xffff0000);
}

// The numbers that `split_pairs` has split, in their order again.
static inline void join_pairs(vf &even, vf &odd) {
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
  const vf low = interleave<0>(even, odd, lanes);
  odd = interleave<W / 2>(even, odd, lanes);
  even = low;
}

// A packed row in floats, `padded` of them and whole vectors: in its place, or in `spare`.
static inline const float *as_floats(const float *row, int64_t, float *) { return row; }
static inline const float *as_floats(const Pair *row, int64_t padded, float *spare) {
  for (int64_t d = 0; d < padded; d += 2 * W) {
    vf first, second;
    split_pairs(load(row + d / 2), first, second);
    join_pairs(first, second);
    store(spare + d, first);
    if (d + W < padded) store(spare + d + W, second);
  }
  return spare;
}

// A row of numbers, for products along it: as it is, or rounded to pairs, which go back into it.
static inline void round_row(const float *from, int64_t width, float *to, int64_t padded) {
  load_row(from, width, to, padded);
}
static inline void round_row(const float *from, int64_t width, Pair *to, int64_t padded) {
  int64_t d = 0;
#if defined(SUBQUAD_PAIRS)
  for (; 2 * (d + W) <= width; d += W) store(to + d, paired_neighbours(from + 2 * d));
#endif
  for (; d < padded; d++) {
    bf16 low = {0}, high = {0};
    if (2 * d < width) narrow(from[2 * d], &low);
    if (2 * d + 1 < width) narrow(from[2 * d + 1], &high);
    to[d] = pair_of(low.bits, high.bits);
  }
}

// Two packed rows in steps of a product that runs over rows, `high` null: one row.
static inline void pair_rows(const Pair *low, const Pair *high, int64_t width, Pair *to, int64_t padded) {
  load_rows_paired((const bf16 *)low, (const bf16 *)high, width, to, padded);
}

// The number of row `j` in one lane of rows over which a product's depth runs; and such a row set to 0.
static float number_at(const float *rows, int64_t j, int64_t wide, int64_t lane) { return rows[j * wide + lane]; }
static float number_at(const Pair *rows, int64_t j, int64_t wide, int64_t lane) {
  const uint32_t bits = rows[j / 2 * wide + lane].bits;
  return as_float(j % 2 ? bits & 0xffff0000 : bits << 16);
}
static void zero_row(float *rows, int64_t j, int64_t wide) { zero(rows + j * wide, wide); }
static void zero_row(Pair *rows, int64_t j, int64_t wide) {
  for (int64_t e = 0; e < wide; e++) rows[j / 2 * wide + e].bits &= j % 2 ? 0x0000ffff : 0xffff0000;
}

// Rows, as `pack_rows`, whose depth runs along them: `padded` numbers each.
template <class T>
static void pack_factor_rows(const Rows &rows, int64_t b, int64_t h, const int32_t *positions, int64_t first,
                             int64_t count, int64_t width, Number<T> *to, int64_t padded) {
  if constexpr (!Factor<T>::PAIRED) {
    pack_rows<T>(rows, b, h, positions, first, count, width, to, padded);
  } else {
    for (int64_t i = 0; i < count; i++) {
      if (positions && i + AHEAD < count)
        ask_for(row_of<T>(rows, b, h, positions[first + i + AHEAD]), width * (int64_t)sizeof(T));
      load_pairs(row_of<T>(rows, b, h, positions ? positions[first + i] : first + i), width, to + i * padded, padded);
    }
  }
}

// Rows over which the depth of a product runs: a row of `padded` numbers for each of its steps.
template <class T>
static void pack_factor_steps(const Rows &rows, int64_t b, int64_t h, const int32_t *positions, int64_t first,
                              int64_t count, int64_t width, Number<T> *to, int64_t padded) {
  if constexpr (!Factor<T>::PAIRED) {
    pack_rows<T>(rows, b, h, positions, first, count, width, to, padded);
  } else {
    auto at = [&](int64_t i) { return row_of<T>(rows, b, h, positions ? positions[first + i] : first + i); };
    for (int64_t i = 0; i < count; i += 2, to += padded)
      load_rows_paired(at(i), i + 1 < count ? at(i + 1) : nullptr, width, to, padded);
  }
}

// Packed rows of numbers to as many rows as they are long: `to_row` numbers each, a multiple of W.
static void pack_factors_across(const float *from, int64_t count, int64_t width, int64_t from_row, float *to,
                                int64_t to_row) {
  pack_transposed(from, count, width, from_row, to, to_row);
}
static void pack_factors_across(const Pair *from, int64_t count, int64_t width, int64_t from_row, Pair *to,
                                int64_t to_row) {
  pack_transposed((const float *)from, count, width, from_row, (float *)to, to_row);  // moves bits alone
}

// The rows of keys whose depth runs along them, where the caller has them if a product can read them there.
template <class T>
static TileRows<Number<T>> key_tile(const Rows &rows, int64_t b, int64_t g, const Positions &keys, int64_t first,
                                    int64_t count, int64_t width, Number<T> *packed) {
  if constexpr (__is_same(T, float))
    if (!keys.at) return {row_of<float>(rows, b, g, first), rows.token};
  if constexpr (Factor<T>::PAIRED) {
    const bf16 *row = row_of<T>(rows, b, g, first);
    if (!keys.at && width % 2 == 0 && rows.token % 2 == 0 && (uintptr_t)row % alignof(Pair) == 0)
      return {(const Pair *)row, rows.token / 2};
  }
  const int64_t padded = round_up(steps_of<Number<T>>(width), W);
  pack_factor_rows<T>(rows, b, g, keys.at, first, count, width, packed, padded);
  return {packed, padded};
}

// The rows of values, over which the depth runs; where the caller has them if these are floats of whole vectors.
template <class T>
static TileRows<Number<T>> value_tile(const Rows &rows, int64_t b, int64_t g, const Positions &keys, int64_t first,
                                      int64_t count, int64_t width, Number<T> *packed) {
  const int64_t padded = round_up(width, W);
  if constexpr (__is_same(T, float))
    if (!keys.at && width == padded) return {row_of<float>(rows, b, g, first), rows.token};
  pack_factor_steps<T>(rows, b, g, keys.at, first, count, width, packed, padded);
  return {packed, padded};
}
