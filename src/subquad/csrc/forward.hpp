// The whole forward pass of clustered (K = 0) and improved clustered attention.

template <class Scratch>
struct PerThread {
  Scratch *of;
  template <class... More>
  PerThread(Arena &arena, const Sizes &s, const More &...more) {
    of = arena.take<Scratch>(s.threads);
    for (int t = 0; t < s.threads; t++) {
      Scratch scratch(arena, s, more...);
      if (arena.base) of[t] = scratch;
    }
  }
};

// Heads run side by side where that keeps the threads busy; a few heads are each split along the sequence.
static inline bool heads_side_by_side(const Sizes &s) {
  const int64_t heads = s.B * s.H;
  return heads % s.threads == 0 || heads >= 4 * s.threads;
}

template <class T>
static void cluster_head(const Forward &a, const Positions &queries, int64_t b, int64_t h, const HashScratch &hash,
                         const KmeansScratch &kmeans, uint64_t *codes, int32_t *labels, int threads, int thread) {
  const Sizes &s = a.sizes;
  const int64_t bh = b * s.H + h;
  int32_t *order = a.saved.order + bh * s.N, *offsets = a.saved.offsets + bh * (s.C + 1);
  if (queries.count > s.C) hash_head<T>(a.query, b, h, queries, s, hash, true, threads, thread, codes);
  kmeans_head(codes, queries.count, s, kmeans, threads, thread, labels);
  sort_by_label(labels, queries, s.C, order, offsets);
  for (int64_t i = queries.count; i < s.N; i++) order[i] = 0;
  parallel_for(threads, s.C, [&](int64_t c, int) {
    mean_row<T>(a.query, b, h, order + offsets[c], offsets[c + 1] - offsets[c], s.D,
                a.saved.centroids + (bh * s.C + c) * s.D);
  });
}

template <class T>
static void zero_padding(const Rows &out, const uint8_t *real, int64_t b, int64_t h, int64_t positions, int64_t width) {
  if (!real) return;
  for (int64_t i = 0; i < positions; i++) {
    if (real[b * positions + i]) continue;
    T *row = row_of<T>(out, b, h, i);
    for (int64_t e = 0; e < width; e++) narrow(0.0f, row + e);
  }
}

template <class T>
static int64_t forward_of(const Forward &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  const Masks queries(arena, a.query_real, s.B, s.N), keys(arena, a.key_real, s.B, s.M);
  HashScratch hash(arena, s);
  const KmeansScratch kmeans(arena, s);
  const Pieces<uint64_t> codes = arena.take_each<uint64_t>(s.B * s.H, s.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(s.B * s.H, s.N);
  const Partial partial(arena, s);
  const PerThread<CentroidScratch> centroids(arena, s);
  const PerThread<MergeScratch> merging(arena, s, partial);
  const PerThread<MemberScratch> members(arena, s);
  if (!arena.base) return arena.used;

  const int64_t heads = s.B * s.H;
  hash.set_planes(a.planes, a.bits, s.D);
  auto cluster = [&](int64_t bh, int threads, int thread) {
    const int64_t b = bh / s.H;
    cluster_head<T>(a, queries.of(b), b, bh % s.H, hash, kmeans, codes[bh], labels[bh], threads, thread);
  };
  const bool side_by_side = heads_side_by_side(s);
  for (int64_t bh = 0; !side_by_side && bh < heads; bh++) cluster(bh, s.threads, 0);
  const Stage clusters = {side_by_side ? heads : 0, [&](int64_t bh, int thread) { cluster(bh, 1, thread); }};

  // Centroids are split over tasks only where there are too few heads and chunks: every part packs the keys again.
  const int64_t chunked = heads * partial.chunks, vectors = (s.C + W - 1) / W;
  int64_t parts = chunked % s.threads == 0 ? 1 : (4 * s.threads + chunked - 1) / chunked;
  parts = parts < vectors ? parts : vectors;
  const int64_t share = (vectors + parts - 1) / parts * W;
  const Stage attention = {chunked * parts, [&](int64_t task, int thread) {
    const int64_t first = task % parts * share, last = first + share < s.C ? first + share : s.C;
    const int64_t chunk = task / parts % partial.chunks, bh = task / parts / partial.chunks, b = bh / s.H;
    if (first < last && chunk * KEY_CHUNK < keys.of(b).count)
      attend_chunk<T>(a, keys.of(b), b, bh % s.H, chunk, first, last, centroids.of[thread], partial);
  }};

  // A few clusters a task: fewer tasks to hand out, and still enough to share.
  const int64_t group = s.C / 16 + 1, groups = (s.C + group - 1) / group;
  const Stage members_of = {heads * groups, [&](int64_t task, int thread) {
    const int64_t bh = task / groups, b = bh / s.H, h = bh % s.H, first = task % groups * group;
    if (first == 0) zero_padding<T>(a.out, a.query_real, b, h, s.N, s.E);
    for (int64_t c = first; c < first + group && c < s.C; c++)
      finish_cluster<T>(a, keys.of(b), b, h, c, partial, merging.of[thread], members.of[thread]);
  }};
  parallel_stages(s.threads, clusters, attention, members_of);
  return arena.used;
}
