// The whole forward pass of clustered (topk = 0) and improved clustered attention, in three stages:
//
//     clusters     per head: hash, k-means, members sorted by cluster, centroids
//     attention    per head, chunk of keys and part of the centroids: softmax sums and candidates for the top keys
//     members      per head and few clusters: chunks merged, top keys split off, and the members' own attention to these

template <class T>
static void cluster_head(const ClusteredForward &a, const Positions &queries, int64_t b, int64_t h,
                         const HashScratch &hash, const KmeansScratch &kmeans, uint64_t *codes, int32_t *labels,
                         int threads, int thread) {
  const ClusteredInputs &in = a.inputs;
  const int64_t bh = b * in.H + h;
  int32_t *order = a.saved.order + bh * in.N, *offsets = a.saved.offsets + bh * (in.clusters + 1);
  if (a.labels) {
    for (int64_t i = 0; i < queries.count; i++) labels[i] = (int32_t)a.labels[bh * in.N + queries[i]];
  } else {
    if (queries.count > in.clusters)
      hash_head<T>(in.query, b, h, in.H, in.D, queries, hash, true, threads, thread, codes);
    kmeans_head(codes, queries.count, in.clusters, a.iterations, kmeans, threads, thread, labels);
  }
  sort_by_label(labels, queries, in.clusters, order, offsets);
  for (int64_t i = queries.count; i < in.N; i++) order[i] = 0;
  parallel_for(threads, in.clusters, [&](int64_t c, int) {
    mean_row<T>(in.query, b, h, order + offsets[c], offsets[c + 1] - offsets[c], in.D,
                a.saved.centroids + (bh * in.clusters + c) * in.D);
  });
}

template <class T>
static void zero_padding(const Rows &out, const uint8_t *valid, int64_t b, int64_t h, int64_t positions, int64_t width) {
  if (!valid) return;
  for (int64_t i = 0; i < positions; i++) {
    if (valid[b * positions + i]) continue;
    T *row = row_of<T>(out, b, h, i);
    for (int64_t e = 0; e < width; e++) narrow(0.0f, row + e);
  }
}

// Labels come from outside: none of them is an index before it was found to be one.
static bool labels_hold(const ClusteredForward &a, const Masks &queries) {
  const ClusteredInputs &in = a.inputs;
  bool hold = true;
  for (int64_t bh = 0; a.labels && bh < in.B * in.H; bh++) {
    const Positions valid = queries.of(bh / in.H);
    const int64_t *labels = a.labels + bh * in.N;
    for (int64_t i = 0; i < valid.count; i++) hold &= (uint64_t)labels[valid[i]] < (uint64_t)in.clusters;
  }
  return hold;
}

// Log-sum-exps of padded queries, which see no key.
static void hide_padding(float *lse, const uint8_t *valid, int64_t positions) {
  for (int64_t i = 0; valid && i < positions; i++)
    if (!valid[i]) lse[i] = -__builtin_inff();
}

template <class T>
static int64_t clustered_forward_of(const ClusteredForward &a, void *workspace) {
  const ClusteredInputs &in = a.inputs;
  Arena arena{(char *)workspace};
  const Masks queries(arena, in.query_valid, in.B, in.N), keys(arena, in.key_valid, in.B, in.M);
  HashScratch hash(arena, in.B * in.H, in.N, in.D, in.threads);
  const KmeansScratch kmeans(arena, in.clusters, in.threads);
  const Pieces<uint64_t> codes = arena.take_each<uint64_t>(in.B * in.H, in.N, PAST);
  const Pieces<int32_t> labels = arena.take_each<int32_t>(in.B * in.H, in.N);
  const ChunkResults results(arena, in);
  const PerThread<CentroidScratch> centroids(arena, in.threads, in);
  const PerThread<MergeScratch> merging(arena, in.threads, in, results);
  const PerThread<MemberScratch> members(arena, in.threads, in);
  if (!arena.base) return arena.used;

  const int64_t heads = in.B * in.H;
  if (!labels_hold(a, queries)) return BAD_LIST;
  if (a.planes) hash.set_planes(a.planes, a.bits, in.D);
  auto cluster = [&](int64_t bh, int threads, int thread) {
    const int64_t b = bh / in.H;
    cluster_head<T>(a, queries.of(b), b, bh % in.H, hash, kmeans, codes[bh], labels[bh], threads, thread);
  };
  const bool side_by_side = heads_side_by_side(heads, in.threads);
  for (int64_t bh = 0; !side_by_side && bh < heads; bh++) cluster(bh, in.threads, 0);
  const Stage clusters = {side_by_side ? heads : 0, [&](int64_t bh, int thread) { cluster(bh, 1, thread); }};

  // Centroids are split over tasks only where there are too few heads and chunks: every part packs the keys again.
  const int64_t chunked = heads * results.chunks, vectors = (in.clusters + W - 1) / W;
  int64_t parts = chunked % in.threads == 0 ? 1 : (4 * in.threads + chunked - 1) / chunked;
  parts = parts < vectors ? parts : vectors;
  const int64_t share = (vectors + parts - 1) / parts * W;
  const Stage attention = {chunked * parts, [&](int64_t task, int thread) {
    const int64_t first = task % parts * share, last = first + share < in.clusters ? first + share : in.clusters;
    const int64_t chunk = task / parts % results.chunks, bh = task / parts / results.chunks, b = bh / in.H;
    if (first < last && chunk * KEY_CHUNK < keys.of(b).count)
      attend_chunk<T>(a, keys.of(b), b, bh % in.H, chunk, first, last, centroids.of[thread], results);
  }};

  // A few clusters per task: fewer tasks to hand out, and still enough to share.
  const int64_t group = in.clusters / 16 + 1, groups = (in.clusters + group - 1) / group;
  const Stage members_of = {heads * groups, [&](int64_t task, int thread) {
    const int64_t bh = task / groups, b = bh / in.H, h = bh % in.H, first = task % groups * group;
    if (first == 0) zero_padding<T>(a.out, in.query_valid, b, h, in.N, in.E);
    if (first == 0 && a.query_lse && in.query_valid) hide_padding(a.query_lse + bh * in.N, in.query_valid + b * in.N, in.N);
    for (int64_t c = first; c < first + group && c < in.clusters; c++)
      finish_cluster<T>(a, keys.of(b), b, h, c, results, merging.of[thread], members.of[thread]);
  }};
  parallel_stages(in.threads, clusters, attention, members_of);
  return arena.used;
}

static int64_t clustered_forward(const ClusteredForward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return clustered_forward_of<decltype(x)>(a, workspace); });
}
