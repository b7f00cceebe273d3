// Vectors of floats as wide as the variant's registers, in the compiler's own vector types: one source for all variants.
// Included inside the variant's namespace, so that no variant's code can be linked into another.

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 4;  // of the accumulators: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 2;  // 12 of 16
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 4;  // 24 of 32
#else
constexpr int W = 4;
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 2;  // 12 of 16
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SUBQUAD_PAIRS  // the variant multiplies pairs of bf16: see `pairs.hpp`
#endif

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), may_alias));  // wraps where vi must not
typedef float vf_anywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_anywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu_anywhere __attribute__((vector_size(W * 4), aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vf_anywhere *)p; }
static inline void store(float *p, vf v) { *(vf_anywhere *)p = v; }
static inline vf splat(float x) { return x - vf{}; }  // x − 0 is x, for −0 and NaN too

// Two bf16 numbers, the first in the low half: two steps of the depth of a product, which such variants take at once.
struct __attribute__((may_alias)) Pair {
  uint32_t bits;
};
static inline vu load(const Pair *p) { return *(const vu_anywhere *)p; }
static inline void store(Pair *p, vu v) { *(vu_anywhere *)p = v; }
static inline vu splat(Pair x) { return vu{} + x.bits; }

static inline vf multiply_add(vf x, vf y, vf to) { return to + x * y; }
#if defined(__AVX512BF16__)
static inline vf multiply_add(vu x, vu y, vf to) {
  return (vf)_mm512_dpbf16_ps((__m512)to, (__m512bh)x, (__m512bh)y);
}
#elif defined(SUBQUAD_PAIRS)
static inline vf multiply_add(vu x, vu y, vf to) {
  return (vf)vbfdotq_f32((float32x4_t)to, (bfloat16x8_t)x, (bfloat16x8_t)y);
}
#endif
// A comparison's lanes are −1 (all bits set) where it holds, else 0.
static inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
static inline vi select(vi mask, vi yes, vi no) { return mask ? yes : no; }
// b where either is NaN: maximum(x, running) passes over NaN, and maximum(vf{}, x) keeps it.
static inline vf maximum(vf a, vf b) { return select(a > b, a, b); }

static inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
#endif
}

// How many of the whole numbers are at least `bound`; `padded` is a multiple of W.
static inline int64_t count_at_least(const int32_t *numbers, int64_t padded, int32_t bound) {
  int64_t count = 0;
#if defined(__AVX512F__)
  for (int64_t i = 0; i < padded; i += W)
    count += __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(numbers + i), _mm512_set1_epi32(bound)));
#else
  vi total = {};
  for (int64_t i = 0; i < padded; i += W) total -= *(const vi_anywhere *)(numbers + i) >= bound;  // −(−1) where it holds
  for (int lane = 0; lane < W; lane++) count += total[lane];
#endif
  return count;
}

// Floats as whole numbers in the same order, and back: the magnitude's bits are flipped where the sign is set.
static inline vi ordered(vf x) { return (vi)x ^ (((vi)x >> 31) & 0x7fffffff); }
static inline vf unordered(vi x) { return (vf)(x ^ ((x >> 31) & 0x7fffffff)); }

static inline float highest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_max_ps(_mm256_extractf128_ps((__m256)v, 1), _mm256_castps256_ps128((__m256)v));
  x = _mm_max_ps(_mm_movehl_ps(x, x), x);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(x), x));
#else
  float best = v[0];
  for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// One bit for each lane where a > b.
static inline uint32_t bits_greater(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#else
  vi greater = a > b;
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(greater[i] & 1) << i;
  return bits;
#endif
}

// Whether a comparison held in every lane.
static inline bool all_set(vi mask) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask((__m512i)mask, _mm512_setzero_si512()) == 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) == 0xff;
#else
  bool all = true;
  for (int i = 0; i < W; i++) all &= mask[i] != 0;
  return all;
#endif
}

// The numbers at these places of a table of `size`, which has `table_of(size)` numbers' room; any at the place `size`.
static inline int64_t table_of(int64_t size) { return size <= 31 ? 32 : size + 1; }
static inline vf look_up(const float *table, int64_t size, vi at) {
#if defined(__AVX512F__)
  if (size <= 32)
    return (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)at, _mm512_loadu_ps(table + 16));
  return (vf)_mm512_i32gather_ps((__m512i)at, table, 4);
#elif defined(__AVX2__)
  return (vf)_mm256_i32gather_ps(table, (__m256i)at, 4);
#else
  vf found;
  for (int lane = 0; lane < W; lane++) found[lane] = table[at[lane]];
  return found;
#endif
}

// 2^−shrunk · eˣ for x ≤ 0, to 2 ulp: 2ⁿ · eʳ with r = x − n ln 2. 0 where fp32 ends, below −87 without shrinking; NaN
// stays NaN.
template <int shrunk = 0>
static inline vf exp_nonpositive(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5·2²³: adding it rounds to the nearest whole number, in the low bits
  vf shifted = x * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;  // ln 2 in two parts: this one has so few bits that the product is exact
  r = r - n * -2.12194440e-4f;
  // Cephes' polynomial for eʳ with |r| ≤ ln 2 / 2, by pairs of its terms, because one after the other each waits for the
  // one before it: the loops of the softmax are bound by this latency.
  const vf r2 = r * r, first = r * 1.6666665459e-1f + 5.0000001201e-1f;
  const vf second = r * 8.3334519073e-3f + 4.1665795894e-2f, third = r * 1.9875691500e-4f + 1.3981999507e-3f;
  const vf p = ((third * r2 + second) * r2 + first) * r2 + r;  // eʳ − 1
  // 2ⁿ: the low bits of `shifted` are n, and the shift moves them to the exponent's place.
  vf power = (vf)(((vu)shifted << 23) + ((127u - shrunk) << 23));
  return select(x < splat(-87.0f + shrunk * 0.6931472f), vf{}, p * power + power);
}

constexpr int SHRUNK = 24;  // weights are 2^−SHRUNK of what they are: 2²⁴ keys of the largest values have a finite sum
constexpr float GROWN = 1 << SHRUNK;

// The lower (half = 0) or upper (half = W / 2) halves of two vectors, interleaved.
template <int half, int... i>
static inline vf interleave(vf a, vf b, std::integer_sequence<int, i...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (i % 2 * W + half + i / 2)...);
#else
  return __builtin_shuffle(a, b, vi{(i % 2 * W + half + i / 2)...});
#endif
}

// Transpose W×W in registers: log2 W rounds that interleave row i with row i + W/2. With W = 4:
//
//     a0 a1 a2 a3      a0 c0 a1 c1      a0 b0 c0 d0
//     b0 b1 b2 b3      a2 c2 a3 c3      a1 b1 c1 d1
//     c0 c1 c2 c3      b0 d0 b1 d1      a2 b2 c2 d2
//     d0 d1 d2 d3      b2 d2 b3 d3      a3 b3 c3 d3
static inline void transpose(vf (&rows)[W]) {
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
  UNROLL for (int round = 1; round < W; round *= 2) {
    vf mixed[W];
    UNROLL for (int i = 0; i < W / 2; i++) {
      mixed[2 * i] = interleave<0>(rows[i], rows[i + W / 2], lanes);
      mixed[2 * i + 1] = interleave<W / 2>(rows[i], rows[i + W / 2], lanes);
    }
    UNROLL for (int i = 0; i < W; i++) rows[i] = mixed[i];
  }
}
