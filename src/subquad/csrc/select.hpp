// The k largest of a few hundred values.

// The k-th largest of `count` ≥ k values, by bisection on their bits; no branch depends on the data. NaNs count as −∞.
// `numbers` is scratch of round_up(count, W).
//
// Floats become whole numbers in the same order. The k-th largest is the largest number that at least k of them reach:
// its bits are found from the highest to the lowest, each by counting how many values reach the number with that bit set.
static float kth_largest(const float *values, int64_t count, int64_t k, int32_t *numbers) {
  const int64_t padded = round_up(count, W);
  for (int64_t i = 0; i < count; i++) {
    const int32_t bits = (int32_t)as_bits(values[i] == values[i] ? values[i] : -__builtin_inff());
    numbers[i] = bits ^ ((bits >> 31) & 0x7fffffff);
  }
  for (int64_t i = count; i < padded; i++) numbers[i] = INT32_MIN;
  int32_t kth = count_at_least(numbers, padded, 0) >= k ? 0 : INT32_MIN;
  for (int bit = 30; bit >= 0; bit--) {
    const int32_t more = kth | (1 << bit);
    kth = count_at_least(numbers, padded, more) >= k ? more : kth;
  }
  return as_float((uint32_t)(kth ^ ((kth >> 31) & 0x7fffffff)));
}

// For each of W columns a bound that at least k of its `count` values exceed, and few more: bisection as above, of all
// columns at once and on the upper half of the bits only, because a bound need not be exact. NaNs count as the largest;
// where one or −∞ is the k-th, the bound is −∞. `numbers` is scratch of count·W.
static vf bound_of_columns(const float *values, int64_t row, int64_t count, int64_t k, int32_t *numbers) {
  for (int64_t i = 0; i < count; i++) *(vi_anywhere *)(numbers + i * W) = ordered(load(values + i * row));
  vi kth = vi{} + INT32_MIN;
  for (int bit = 31; bit >= 16; bit--) {
    const vi more = kth ^ (int32_t)(1u << bit);  // sets the bit; at first it clears the sign
    vi found = {};
    for (int64_t i = 0; i < count; i++) found -= *(const vi_anywhere *)(numbers + i * W) >= more;
    const vi enough = found >= (int32_t)k;
    kth = (enough & more) | (~enough & kth);
  }
  // One less, so that values equal to the k-th exceed it. Below −∞ and above +∞ the numbers are NaNs, which become −∞.
  const vf bound = unordered((vi)((vu)kth - 1u));
  // Below 0 it would be −0, which 0 does not exceed, nor subnormal numbers where they count as 0.
  const vf least = splat(1.17549435e-38f);
  const vf around = select((bound > vf{} - least) & (bound < least), vf{} - least, bound);
  return maximum(around, splat(-__builtin_inff()));
}

// Move the k largest of `count` > k pairs to the front, in their order, NaNs left out; of equal values the first are kept.
// Returns how many were kept, which is k without NaNs, and the k-th value. There is room for W − 1 more in both.
static int64_t keep_largest(float *values, int32_t *indices, int64_t count, int64_t k, int32_t *numbers, float *kth) {
  const float bound = *kth = kth_largest(values, count, k, numbers);
  int64_t above = 0, tied = 0, kept = 0;
  for (int64_t i = 0; i < count; i++) {
    above += values[i] > bound;
    tied += values[i] == bound;
  }
#if defined(__AVX512F__)
  if (above + tied == k) {
    for (int64_t i = 0; i < count; i += W) {
      const __mmask16 present = count - i < W ? (1u << (count - i)) - 1 : 0xffff;
      const __m512 v = _mm512_loadu_ps(values + i);
      const __m512i index = _mm512_loadu_si512(indices + i);
      const __mmask16 keep = _mm512_mask_cmp_ps_mask(present, v, _mm512_set1_ps(bound), _CMP_GE_OQ);
      _mm512_storeu_ps(values + kept, _mm512_maskz_compress_ps(keep, v));  // what it writes past `kept` has been read
      _mm512_storeu_si512(indices + kept, _mm512_maskz_compress_epi32(keep, index));
      kept += __builtin_popcount(keep);
    }
    return kept;
  }
#endif
  int64_t ties = k - above;  // how many of the values that equal the k-th are kept
  for (int64_t i = 0; i < count; i++) {
    const float value = values[i];
    const bool tie = value == bound && ties > 0, keep = value > bound || tie;
    values[kept] = value;
    indices[kept] = indices[i];
    kept += keep;
    ties -= tie;
  }
  return kept;
}
