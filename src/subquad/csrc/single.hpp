// The hash and k-means on their own.

template <class T>
static int64_t hash_of(const Hashing &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  const Masks queries(arena, a.query_real, s.B, s.N);
  HashScratch scratch(arena, s);
  const Pieces<uint64_t> ranked = arena.take_each<uint64_t>(s.B * s.H, s.N);
  if (!arena.base) return arena.used;
  scratch.set_planes(a.planes, a.bits, s.D);
  const int side_by_side = heads_side_by_side(s) ? s.threads : 1, within = side_by_side > 1 ? 1 : s.threads;
  parallel_for(side_by_side, s.B * s.H, [&](int64_t bh, int thread) {
    const Positions positions = queries.of(bh / s.H);
    uint64_t *codes = ranked[bh], *out = a.codes + bh * s.N;
    hash_head<T>(a.query, bh / s.H, bh % s.H, positions, s, scratch, a.centre != 0, within, thread, codes);
    for (int64_t i = 0; i < s.N; i++) out[i] = 0;
    for (int64_t i = 0; i < positions.count; i++) out[positions[i]] = codes[i];
  });
  return arena.used;
}

static int64_t kmeans_of(const Clustering &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  const Masks queries(arena, a.query_real, s.B, s.N);
  const KmeansScratch scratch(arena, s);
  const Pieces<uint64_t> ranked = arena.take_each<uint64_t>(s.B * s.H, s.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(s.B * s.H, s.N);
  if (!arena.base) return arena.used;
  const int side_by_side = heads_side_by_side(s) ? s.threads : 1, within = side_by_side > 1 ? 1 : s.threads;
  parallel_for(side_by_side, s.B * s.H, [&](int64_t bh, int thread) {
    const Positions positions = queries.of(bh / s.H);
    for (int64_t i = 0; i < positions.count; i++) ranked[bh][i] = a.codes[bh * s.N + positions[i]];
    kmeans_head(ranked[bh], positions.count, s, scratch, within, thread, labels[bh]);
    for (int64_t i = 0; i < s.N; i++) a.labels[bh * s.N + i] = s.C;
    for (int64_t i = 0; i < positions.count; i++) a.labels[bh * s.N + positions[i]] = labels[bh][i];
  });
  return arena.used;
}
