// Tokens sorted by label into blocks of K slots, each label starting a new block; a label of C is in none.
static int64_t bucket_blocks(const Blocking &a, void *workspace) {
  Arena arena{(char *)workspace};
  int64_t *next = arena.take<int64_t>(a.B * a.H * a.buckets);
  if (!arena.base) return arena.used;
  const int64_t T = (a.N + a.slots - 1) / a.slots + a.buckets;
  parallel_for(a.threads, a.B * a.H, [&](int64_t bh, int) {
    const int64_t *labels = a.labels + bh * a.N;
    int64_t *tokens = a.tokens + bh * T * a.slots, *bucket = a.bucket + bh * T, *slot = next + bh * a.buckets, block = 0;
    for (int64_t c = 0; c < a.buckets; c++) slot[c] = 0;
    for (int64_t i = 0; i < a.N; i++)
      if (filled(labels[i], a.buckets)) slot[labels[i]]++;
    for (int64_t c = 0; c < a.buckets; c++) {
      const int64_t blocks = (slot[c] + a.slots - 1) / a.slots;
      slot[c] = block * a.slots;
      for (const int64_t end = block + blocks; block < end; block++) bucket[block] = c;
    }
    a.used[bh] = block;
    for (int64_t t = block; t < T; t++) bucket[t] = a.buckets - 1;
    for (int64_t i = 0; i < T * a.slots; i++) tokens[i] = a.N;
    for (int64_t i = 0; i < a.N; i++)
      if (filled(labels[i], a.buckets)) tokens[slot[labels[i]]++] = i;
  });
  return arena.used;
}
