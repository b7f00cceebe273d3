// Rows in the caller's dtype to packed rows of fp32, and back.

struct __attribute__((may_alias)) bf16 {  // `Pair`s are two of them
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline uint32_t as_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { return as_float((uint32_t)x.bits << 16); }
static inline float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest << 13));      // infinity and NaN
  float magnitude = as_float(rest << 13) * as_float((127 + 112) << 23);       // re-biases the exponent; subnormals too
  return as_float(sign | as_bits(magnitude));
#endif
}

static inline void narrow(float x, float *to) { *to = x; }
static inline void narrow(float x, bf16 *to) {  // to nearest, ties to even
  uint32_t bits = as_bits(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}
static inline void narrow(float x, f16 *to) {
#if defined(__F16C__)
  to->bits = _cvtss_sh(x, 0);
#else
  uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000;
  float magnitude = as_float(bits & 0x7fffffff);
  if (!(magnitude <= as_float(0x7f800000))) { to->bits = 0x7e00; return; }        // NaN
  if (magnitude >= 65520.0f) { to->bits = sign | 0x7c00; return; }                // rounds to infinity
  if (magnitude < 6.103515625e-05f) {                                             // subnormal: whole multiples of 2⁻²⁴
    to->bits = sign | (uint32_t)__builtin_rintf(magnitude * 16777216.0f);
    return;
  }
  uint32_t m = as_bits(magnitude) - (112u << 23);
  to->bits = sign | ((m + 0xfff + ((m >> 13) & 1)) >> 13);
#endif
}

// `width` elements to fp32, then zeros up to `padded`.
template <class T>
static inline void load_row(const T *from, int64_t width, float *to, int64_t padded) {
  int64_t d = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, f16))
    for (; d + 8 <= width; d += 8) _mm256_storeu_ps(to + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + d))));
#endif
  if constexpr (__is_same(T, float))
    for (; d + W <= width; d += W) store(to + d, load(from + d));
  for (; d < width; d++) to[d] = widen(from[d]);
  for (; d < padded; d++) to[d] = 0;
}

template <class T>
static inline void store_row(const float *from, int64_t width, T *to) {
  int64_t d = 0;
#if defined(__F16C__)
  if constexpr (__is_same(T, f16))
    for (; d + 8 <= width; d += 8) _mm_storeu_si128((__m128i *)(to + d), _mm256_cvtps_ph(_mm256_loadu_ps(from + d), 0));
#endif
  if constexpr (__is_same(T, float))
    for (; d + W <= width; d += W) store(to + d, load(from + d));
  for (; d < width; d++) narrow(from[d], to + d);
}

template <class T>
static inline T *row_of(const Rows &rows, int64_t b, int64_t h, int64_t position) {
  return (T *)rows.data + b * rows.batch + h * rows.head + position * rows.token;
}

constexpr int64_t AHEAD = 8;         // rows that are asked for in advance, where no hardware can guess them
constexpr int64_t CACHE_LINE = 64;  // bytes

static inline void ask_for(const void *row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch((const char *)row + at);
}

// Rows at the given positions (null: first, first + 1, …) packed one below the other, `padded` floats each.
template <class T>
static void pack_rows(const Rows &rows, int64_t b, int64_t h, const int32_t *positions, int64_t first, int64_t count,
                      int64_t width, float *to, int64_t padded) {
  for (int64_t i = 0; i < count; i++) {
    int64_t position = positions ? positions[first + i] : first + i;
    if (positions && i + AHEAD < count)
      ask_for(row_of<T>(rows, b, h, positions[first + i + AHEAD]), width * (int64_t)sizeof(T));
    load_row(row_of<T>(rows, b, h, position), width, to + i * padded, padded);
  }
}

// Rows of `width` numbers (rounded up to W, the rest being zeros) to `width` rows of `count`, which is a multiple of W;
// row_at(i) is where row i is.
template <class RowAt>
static inline void pack_across(int64_t count, int64_t width, float *to, int64_t to_row, RowAt &&row_at) {
  for (int64_t i = 0; i < count; i += W) {
    const float *from[W];
    UNROLL for (int r = 0; r < W; r++) from[r] = row_at(i + r);
    for (int64_t d = 0; d < width; d += W) {
      vf block[W];
      UNROLL for (int r = 0; r < W; r++) block[r] = load(from[r] + d);
      transpose(block);
      int64_t rows = width - d < W ? width - d : W;
      if (rows == W) {
        UNROLL for (int r = 0; r < W; r++) store(to + (d + r) * to_row + i, block[r]);
      } else {
        for (int r = 0; r < rows; r++) store(to + (d + r) * to_row + i, block[r]);
      }
    }
  }
}

// The same of packed rows.
static void pack_transposed(const float *from, int64_t count, int64_t width, int64_t from_row, float *to, int64_t to_row) {
  pack_across(count, width, to, to_row, [&](int64_t i) { return from + i * from_row; });
}

static void zero(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = 0;
}

// Multiplies whole vectors; whether what they held was finite.
static bool scale_row(float *row, int64_t wide, float by) {
  vf zeros = {};
  for (int64_t d = 0; d < wide; d += W) {
    const vf x = load(row + d);
    zeros += x * 0.0f;  // 0·∞ is NaN
    store(row + d, x * by);
  }
  return all_set(zeros == vf{});
}

static bool is_finite(const float *row, int64_t width) {
  vf zeros = {};
  for (int64_t e = 0; e < width; e += W) zeros += load(row + e) * 0.0f;  // 0·∞ is NaN
  return all_set(zeros == vf{});
}

// The products one after the other, each added as `gemm` adds it, so that equal rows give equal bits: fused where the
// compiler fuses the vectors of `gemm`. It may vectorise and not fuse a loop of scalars that leaves it the choice.
static inline float dot(const float *a, const float *b, int64_t n, float before = 0) {
  for (int64_t from = 0; from < n; from += GEMM_DEPTH) {
    float sum = 0;
    for (int64_t i = from; i < n && i < from + GEMM_DEPTH; i++) {
#if defined(__FP_FAST_FMAF)
      sum = __builtin_fmaf(a[i], b[i], sum);
#else
      sum += a[i] * b[i];
#endif
    }
    before += sum;
  }
  return before;
}

// What rounding took from lse = highest + log_total. At large logits fp32 leaves nothing of ln Σ: weights made again as
// e^{(logit − lse) − residual} are those of the forward pass, because logit − lse is exact where the weight counts.
static inline float residual_of(float lse, float highest, float log_total) {
  return lse == -__builtin_inff() ? 0 : (highest - lse) + log_total;
}

// run(x) with an x of the type of `dtype`.
template <class Run>
static int64_t by_dtype(Dtype dtype, Run &&run) {
  switch (dtype) {
    case BFLOAT16: return run(bf16{});
    case FLOAT16: return run(f16{});
    default: return run(float{});
  }
}
