// The hash and k-means on their own.

template <class T>
static int64_t hash_of(const Hashing &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks valid(arena, a.valid, a.B, a.N);
  HashScratch scratch(arena, a.B * a.H, a.N, a.D, a.threads);
  const Pieces<uint64_t> ranked = arena.take_each<uint64_t>(a.B * a.H, a.N);
  if (!arena.base) return arena.used;
  scratch.set_planes(a.planes, a.bits, a.D);
  const bool side_by_side = heads_side_by_side(a.B * a.H, a.threads);
  parallel_for(side_by_side ? a.threads : 1, a.B * a.H, [&](int64_t bh, int thread) {
    const Positions positions = valid.of(bh / a.H);
    uint64_t *codes = ranked[bh];
    int64_t *out = a.codes + bh * a.N;
    hash_head<T>(a.x, bh / a.H, bh % a.H, a.H, a.D, positions, scratch, a.centre != 0, side_by_side ? 1 : a.threads,
                 thread, codes);
    for (int64_t i = 0; i < a.N; i++) out[i] = 0;
    for (int64_t i = 0; i < positions.count; i++) out[positions[i]] = (int64_t)codes[i];
  });
  return arena.used;
}

static int64_t hash(const Hashing &a, void *workspace) {
  return by_dtype(a.dtype, [&](auto x) { return hash_of<decltype(x)>(a, workspace); });
}

static int64_t kmeans(const Clustering &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks valid(arena, a.valid, a.B, a.N);
  const KmeansScratch scratch(arena, a.clusters, a.threads);
  const Pieces<uint64_t> ranked = arena.take_each<uint64_t>(a.B * a.H, a.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(a.B * a.H, a.N);
  if (!arena.base) return arena.used;
  const bool side_by_side = heads_side_by_side(a.B * a.H, a.threads);
  parallel_for(side_by_side ? a.threads : 1, a.B * a.H, [&](int64_t bh, int thread) {
    const Positions positions = valid.of(bh / a.H);
    for (int64_t i = 0; i < positions.count; i++) ranked[bh][i] = (uint64_t)a.codes[bh * a.N + positions[i]];
    kmeans_head(ranked[bh], positions.count, a.clusters, a.iterations, scratch, side_by_side ? 1 : a.threads, thread,
                labels[bh]);
    for (int64_t i = 0; i < a.N; i++) a.labels[bh * a.N + i] = a.clusters;
    for (int64_t i = 0; i < positions.count; i++) a.labels[bh * a.N + positions[i]] = labels[bh][i];
  });
  return arena.used;
}
