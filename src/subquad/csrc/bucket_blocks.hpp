// Tokens sorted by label into blocks of slots, each label starting a new block. With 3 buckets and blocks of 2 slots:
//
//     labels     1 0 1 1 2
//     tokens     1 ·   0 2   3 ·   4 ·   · ·   · ·      · is N, an empty slot
//     bucket      0     1     1     2     2     2       behind the `used` 4 blocks: the last bucket, without tokens
static int64_t bucket_blocks(const Blocking &a, void *workspace) {
  Arena arena{(char *)workspace};
  int64_t *next = arena.take<int64_t>(a.B * a.H * a.buckets);
  if (!arena.base) return arena.used;
  const int64_t T = (a.N + a.slots - 1) / a.slots + a.buckets;
  parallel_for(a.threads, a.B * a.H, [&](int64_t bh, int) {
    const int64_t *labels = a.labels + bh * a.N;
    int64_t *tokens = a.tokens + bh * T * a.slots, *bucket = a.bucket + bh * T, block = 0;
    int64_t *slot = next + bh * a.buckets;  // of each label: how many tokens it has, then its next free slot
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
