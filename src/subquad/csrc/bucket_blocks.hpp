// Tokens sorted by label into blocks of K slots, each label starting a new block; a label of C is in none.
static int64_t blocks_of(const Blocking &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  int64_t *next = arena.take<int64_t>(s.B * s.H * s.C);
  if (!arena.base) return arena.used;
  const int64_t T = (s.N + s.K - 1) / s.K + s.C;
  parallel_for(s.threads, s.B * s.H, [&](int64_t bh, int) {
    const int64_t *labels = a.labels + bh * s.N;
    int64_t *tokens = a.tokens + bh * T * s.K, *bucket = a.bucket + bh * T, *slot = next + bh * s.C, block = 0;
    for (int64_t c = 0; c < s.C; c++) slot[c] = 0;
    for (int64_t i = 0; i < s.N; i++)
      if (filled(labels[i], s.C)) slot[labels[i]]++;
    for (int64_t c = 0; c < s.C; c++) {
      const int64_t blocks = (slot[c] + s.K - 1) / s.K;
      slot[c] = block * s.K;
      for (const int64_t end = block + blocks; block < end; block++) bucket[block] = c;
    }
    a.used[bh] = block;
    for (int64_t t = block; t < T; t++) bucket[t] = s.C - 1;
    for (int64_t i = 0; i < T * s.K; i++) tokens[i] = s.N;
    for (int64_t i = 0; i < s.N; i++)
      if (filled(labels[i], s.C)) tokens[slot[labels[i]]++] = i;
  });
  return arena.used;
}
