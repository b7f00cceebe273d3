// K-means of 64-bit codes under Hamming distance: Lloyd's algorithm, bit for bit as `subquad.kernels.kmeans` states it.
//
// Exact short cuts: it ends when no label changes (then nothing ever will), and the votes for a centroid's bits are
// updated by the codes that changed their cluster:
//
//                      bit 0   1   2  …  62   63
//     votes[cluster]       5   0   3  …   2    5      how many members have each bit; bit 63 is set in all of them,
//     centroid             1   0   1  …   0           so its votes count the members, and a bit is set by more than half

constexpr int64_t KMEANS_BLOCK = 8192;  // codes whose changes of votes fit 16 bits
constexpr int64_t PAST = 32;  // codes and labels behind the last that are read and written, and never used
constexpr uint64_t PRESENT = 1ull << 63;  // set in every code: its votes count a cluster's members

static inline int popcount(uint64_t x) {
#if defined(__POPCNT__) || defined(__aarch64__)
  return __builtin_popcountll(x);
#else
  x -= (x >> 1) & 0x5555555555555555;
  x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333);
  return (((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101) >> 56;
#endif
}

#if defined(__AVX2__) && !(defined(__AVX512VPOPCNTDQ__) && defined(__AVX512IFMA__))
// How many bits are set in each of four words: a table has the counts of four bits, and a word's sixteen are summed.
static inline __m256i popcounts(__m256i x) {
  const __m256i counts = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                          0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i four = _mm256_set1_epi8(15);
  const __m256i low = _mm256_shuffle_epi8(counts, _mm256_and_si256(x, four));
  const __m256i high = _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi64(x, 4), four));
  return _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());
}

// As `nearest`, for at most 2¹⁶ − 1 centroids. Two vectors of distances share one of 32-bit lanes, as distance·2¹⁶ + number:
// the smallest is the nearest centroid, and of equally near ones the first.
static int64_t nearest_by_bytes(const uint64_t *codes, int64_t count, const uint64_t *centroids, int64_t C,
                                int32_t *labels) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), number = _mm256_set1_epi32(0xffff);
  for (int64_t i = 0; i < count; i += 16) {  // the last round passes the end
    __m256i x[4], best[2];
    for (int j = 0; j < 4; j++) x[j] = _mm256_loadu_si256((const __m256i *)(codes + i + 4 * j));
    best[0] = best[1] = _mm256_set1_epi32(-1);
    for (int64_t c = 0; c < C; c++) {
      const __m256i centroid = _mm256_set1_epi64x((int64_t)centroids[c]), own = _mm256_set1_epi32((int32_t)c);
      for (int j = 0; j < 2; j++) {
        const __m256i even = popcounts(_mm256_xor_si256(x[2 * j], centroid));
        const __m256i odd = popcounts(_mm256_xor_si256(x[2 * j + 1], centroid));
        const __m256i both = _mm256_or_si256(_mm256_slli_epi64(even, 16), _mm256_slli_epi64(odd, 48));
        best[j] = _mm256_min_epu32(best[j], _mm256_or_si256(both, own));
      }
    }
    for (int j = 0; j < 2; j++) {
      const __m256i found = _mm256_permutevar8x32_epi32(_mm256_and_si256(best[j], number), order);
      _mm256_storeu_si256((__m256i *)(labels + i + 8 * j), found);
    }
  }
  return count;
}
#endif

// The nearest centroid of each code; the lowest number wins a tie.
static void nearest(const uint64_t *codes, int64_t count, const uint64_t *centroids, int64_t C, int32_t *labels) {
  int64_t i = 0;
#if defined(__AVX512VPOPCNTDQ__) && defined(__AVX512IFMA__)
  // distance·2⁴⁰ + number in one multiply-add: the smallest is the nearest centroid, and of equally near ones the first.
  // Four vectors of codes at once, because each step waits for the one before it.
  const __m512i shift = _mm512_set1_epi64(1ll << 40);
  for (; i < count; i += PAST) {  // the last round passes the end
    __m512i x[4], best[4];
    for (int j = 0; j < 4; j++) {
      x[j] = _mm512_loadu_si512(codes + i + 8 * j);
      best[j] = _mm512_set1_epi64(-1);
    }
    for (int64_t c = 0; c < C; c++) {
      __m512i centroid = _mm512_set1_epi64(centroids[c]), number = _mm512_set1_epi64(c);
      for (int j = 0; j < 4; j++) {
        __m512i distance = _mm512_popcnt_epi64(_mm512_xor_si512(x[j], centroid));
        best[j] = _mm512_min_epu64(best[j], _mm512_madd52lo_epu64(number, distance, shift));
      }
    }
    for (int j = 0; j < 4; j++)
      _mm256_storeu_si256((__m256i *)(labels + i + 8 * j), _mm512_cvtepi64_epi32(best[j]));
  }
#else
#if defined(__AVX2__)
  if (C <= 0xffff) i = nearest_by_bytes(codes, count, centroids, C, labels);
#endif
  for (; i < count; i++) {
    uint64_t best = ~0ull;
    for (int64_t c = 0; c < C; c++) {
      uint64_t key = ((uint64_t)popcount(codes[i] ^ centroids[c]) << 40) + (uint64_t)c;
      best = key < best ? key : best;
    }
    labels[i] = (int32_t)best;
  }
#endif
}

// votes[bit] += sign where the code's bit is set.
static inline void vote(int16_t *votes, uint64_t code, bool add) {
#if defined(__AVX512BW__)
  __m512i one = _mm512_set1_epi16(add ? 1 : -1), low = _mm512_loadu_si512(votes), high = _mm512_loadu_si512(votes + 32);
  _mm512_storeu_si512(votes, _mm512_mask_add_epi16(low, (__mmask32)code, low, one));
  _mm512_storeu_si512(votes + 32, _mm512_mask_add_epi16(high, (__mmask32)(code >> 32), high, one));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
  for (int part = 0; part < 64; part += 16) {
    const __m256i own = _mm256_and_si256(_mm256_set1_epi16((int16_t)(code >> part)), bits);
    const __m256i set = _mm256_cmpeq_epi16(own, bits);  // −1 where the bit is set
    const __m256i old = _mm256_loadu_si256((const __m256i *)(votes + part));
    _mm256_storeu_si256((__m256i *)(votes + part), add ? _mm256_sub_epi16(old, set) : _mm256_add_epi16(old, set));
  }
#else
  for (int bit = 0; bit < 64; bit++) votes[bit] += add ? (code >> bit) & 1 : -(int)((code >> bit) & 1);
#endif
}

struct KmeansScratch {
  Pieces<uint64_t> centroids;  // a head in flight: (C)
  Pieces<int32_t> votes;       // a thread: (C,64)
  Pieces<int16_t> changes;     // a thread: (C,64)
  Pieces<int32_t> proposed;    // a thread: a block's new labels
  int64_t *changed;            // a thread

  KmeansScratch(Arena &arena, int64_t C, int64_t threads) {
    centroids = arena.take_each<uint64_t>(threads, C);
    votes = arena.take_each<int32_t>(threads, C * WORD);
    changes = arena.take_each<int16_t>(threads, C * WORD);
    proposed = arena.take_each<int32_t>(threads, KMEANS_BLOCK + PAST);
    changed = arena.take<int64_t>(threads * 8);  // a cache line each
  }
};

// Assign a block of codes anew; add the changes of votes to the thread's. Returns how many labels changed.
static int64_t reassign(const uint64_t *codes, int32_t *labels, int64_t count, const uint64_t *centroids, int64_t C,
                        int32_t *proposed, int16_t *changes, int32_t *votes) {
  nearest(codes, count, centroids, C, proposed);
  int64_t changed = 0;
  for (int64_t i = 0; i < C * WORD; i++) changes[i] = 0;
  for (int64_t i = 0; i < count; i++) {
    if (proposed[i] == labels[i]) continue;
    if (labels[i] >= 0) vote(changes + labels[i] * WORD, codes[i], false);
    vote(changes + proposed[i] * WORD, codes[i], true);
    labels[i] = proposed[i];
    changed++;
  }
  if (changed)
    for (int64_t i = 0; i < C * WORD; i++) votes[i] += changes[i];
  return changed;
}

// A bit is what most members have; a tie, and so an empty cluster, keeps the old one.
static uint64_t majority(const int32_t *const *votes, int teams, int64_t c, uint64_t old) {
  int32_t ones[WORD];
  for (int bit = 0; bit < WORD; bit++) ones[bit] = votes[0][c * WORD + bit];
  for (int t = 1; t < teams; t++)
    for (int bit = 0; bit < WORD; bit++) ones[bit] += votes[t][c * WORD + bit];
  uint64_t set = 0, tied = 0;
  const int32_t members = ones[WORD - 1];
#if defined(__AVX512F__)
  for (int v = 0; v < WORD; v += 16) {
    __m512i twice = _mm512_slli_epi32(_mm512_loadu_si512(ones + v), 1), all = _mm512_set1_epi32(members);
    set |= (uint64_t)_mm512_cmpgt_epi32_mask(twice, all) << v;
    tied |= (uint64_t)_mm512_cmpeq_epi32_mask(twice, all) << v;
  }
#else
  for (int bit = 0; bit < WORD; bit++) {
    set |= (uint64_t)(2 * ones[bit] > members) << bit;
    tied |= (uint64_t)(2 * ones[bit] == members) << bit;
  }
#endif
  return set | (tied & old);
}

// Labels of one head's codes, by rank; `codes` has room for PAST more. `threads` > 1 splits the sequence.
static void kmeans_head(uint64_t *codes, int64_t n, int64_t C, int64_t iterations, const KmeansScratch &scratch,
                        int threads, int thread, int32_t *labels) {
  if (n <= C) {
    for (int64_t i = 0; i < n; i++) labels[i] = (int32_t)i;
    return;
  }
  const int64_t table = C * WORD;
  const int team = threads > 1 ? threads : 1, own = threads > 1 ? 0 : thread;
  uint64_t *centroids = scratch.centroids[own];
  const int32_t *votes[MAX_THREADS];
  for (int t = 0; t < team; t++) {
    int32_t *clear = scratch.votes[own + t];
    for (int64_t i = 0; i < table; i++) clear[i] = 0;
    votes[t] = clear;
  }
  for (int64_t i = 0; i < n; i++) {
    codes[i] |= PRESENT;
    labels[i] = -1;
  }
  for (int64_t c = 0; c < C; c++) centroids[c] = codes[c * n / C];
  // Four blocks per thread, for a thread that starts late; of whole rounds of `nearest`.
  const int64_t block = team > 1 ? round_up((n + 4 * team - 1) / (4 * team), 32) : KMEANS_BLOCK;
  const int64_t size = block < KMEANS_BLOCK ? block : KMEANS_BLOCK, tasks = (n + size - 1) / size;
  for (int64_t round = 0; round <= iterations; round++) {
    int64_t changed = 0;
    for (int t = 0; t < team; t++) scratch.changed[(own + t) * 8] = 0;
    parallel_for(team, tasks, [&](int64_t task, int of_team) {
      int64_t t = own + of_team, first = task * size, count = n - first < size ? n - first : size;
      scratch.changed[t * 8] +=
          reassign(codes + first, labels + first, count, centroids, C, scratch.proposed[t],
                   scratch.changes[t], scratch.votes[t]);
    });
    for (int t = 0; t < team; t++) changed += scratch.changed[(own + t) * 8];
    if (!changed || round == iterations) return;  // the last round only assigns
    for (int64_t c = 0; c < C; c++) centroids[c] = majority(votes, team, c, centroids[c]);
  }
}
