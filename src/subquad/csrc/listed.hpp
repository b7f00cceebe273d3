// Attention of each cluster's members to the rows that the cluster lists, no two of which list the same row:
//
//     lists      per head: members sorted by cluster; what is in no cluster, or listed nowhere, gives and gets 0
//     members    per few clusters: the listed rows, packed once, against tiles of members

// The sizes of what a cluster's members meet, for the scratch of the tail's members.
static TailInputs sizes_of(const ListedInputs &in) {
  TailInputs sizes{};
  sizes.B = sizes.H = sizes.G = sizes.clusters = 1;
  sizes.N = in.N;
  sizes.D = in.D;
  sizes.E = in.E;
  sizes.topk = in.slots;
  return sizes;
}

struct ListedHeads {
  Pieces<int32_t> order, offsets;  // a head: (N), (clusters + 1)

  ListedHeads(Arena &arena, const ListedInputs &in) {
    order = arena.take_each<int32_t>(in.B * in.H, in.N);
    offsets = arena.take_each<int32_t>(in.B * in.H, in.clusters + 1);
  }

  // A stable counting sort, as `sort_tokens`, that treats any other label as none.
  void sort(const ListedInputs &in, int64_t bh) const {
    const int64_t *labels = in.labels + bh * in.N, C = in.clusters;
    int32_t *to = order[bh], *starts = offsets[bh];
    for (int64_t c = 0; c <= C; c++) starts[c] = 0;
    for (int64_t i = 0; i < in.N; i++)
      if ((uint64_t)labels[i] < (uint64_t)C) starts[labels[i] + 1]++;
    for (int64_t c = 0; c < C; c++) starts[c + 1] += starts[c];
    for (int64_t i = 0; i < in.N; i++)
      if ((uint64_t)labels[i] < (uint64_t)C) to[starts[labels[i]]++] = (int32_t)i;
    for (int64_t c = C; c > 0; c--) starts[c] = starts[c - 1];
    starts[0] = 0;
  }
};

// Packs the rows that cluster c lists; returns how many there are, and their numbers.
static int64_t pack_listed(const ListedInputs &in, int64_t bh, int64_t c, const MetScratch &to, int32_t *numbers) {
  const int64_t b = bh / in.H, h = bh % in.H;
  const int64_t *list = in.lists + (bh * in.clusters + c) * in.slots;
  int64_t K = 0;
  for (int64_t k = 0; k < in.slots; k++) {
    if ((uint64_t)list[k] >= (uint64_t)in.rows) continue;
    to.take(K, row_of<float>(in.key, b, h, list[k]), in.D, row_of<float>(in.value, b, h, list[k]), in.E);
    to.bias[K] = in.bias[bh * in.rows + list[k]];
    numbers[K++] = (int32_t)list[k];
  }
  to.fill_up(K, in.D);
  return K;
}

static void zero_rows(const Rows &rows, int64_t b, int64_t h, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; i++) zero(row_of<float>(rows, b, h, i), width);
}

// What is in no cluster gets 0; what is in one is written with its cluster.
static void zero_others(const ListedInputs &in, const Rows &rows, int64_t bh, int64_t width) {
  for (int64_t i = 0; i < in.N; i++)
    if ((uint64_t)in.labels[bh * in.N + i] >= (uint64_t)in.clusters)
      zero(row_of<float>(rows, bh / in.H, bh % in.H, i), width);
}

// A cluster that lists nothing gives its members 0.
static void zero_members(const ListedHeads &heads, const ListedInputs &in, const Rows &rows, int64_t bh, int64_t c,
                         int64_t width) {
  for (int32_t i = heads.offsets[bh][c]; i < heads.offsets[bh][c + 1]; i++)
    zero(row_of<float>(rows, bh / in.H, bh % in.H, heads.order[bh][i]), width);
}

static void listed_members(const ListedForward &a, const ListedHeads &heads, int64_t bh, int64_t c, int32_t *numbers,
                           const TailMemberScratch<float> &own) {
  const ListedInputs &in = a.inputs;
  const int32_t *order = heads.order[bh], *bounds = heads.offsets[bh] + c;
  const int64_t b = bh / in.H, h = bh % in.H, E = round_up(in.E, W);
  if (bounds[0] == bounds[1]) return;
  const int64_t K = pack_listed(in, bh, c, own.met, numbers);
  if (!K) zero_members(heads, in, a.out, bh, c, in.E);
  for (int64_t first = bounds[0]; K && first < bounds[1]; first += TAIL_TILE<float>) {
    const int64_t count = bounds[1] - first < TAIL_TILE<float> ? bounds[1] - first : TAIL_TILE<float>;
    pack_rows<float>(in.query, b, h, order, first, count, in.D, own.queries, in.D);
    attend_met(count, K, in.D, in.E, in.scale, own);
    for (int64_t i = 0; i < count; i++) {
      scale_row(own.out + i * E, E, own.norms[i]);
      store_row(own.out + i * E, in.E, row_of<float>(a.out, b, h, order[first + i]));
      a.lse[bh * in.N + order[first + i]] = own.lse[i];
    }
  }
}

// Runs begin(head) for every head, then members(head, cluster, thread) for every cluster.
template <class Begin, class Members>
static void over_listed(const ListedInputs &in, Begin &&begin, Members &&members) {
  const int64_t heads = in.B * in.H, step = in.clusters / 16 + 1, steps = (in.clusters + step - 1) / step;
  const Stage lists = {heads, [&](int64_t bh, int) { begin(bh); }};
  const Stage of_clusters = {heads * steps, [&](int64_t task, int thread) {
    const int64_t from = task % steps * step;
    for (int64_t c = from; c < from + step && c < in.clusters; c++) members(task / steps, c, thread);
  }};
  parallel_stages(in.threads, lists, of_clusters);
}

static int64_t listed_forward(const ListedForward &a, void *workspace) {
  const ListedInputs &in = a.inputs;
  const TailInputs sizes = sizes_of(in);
  Arena arena{(char *)workspace};
  const ListedHeads heads(arena, in);
  const PerThread<TailMemberScratch<float>> scratch(arena, in.threads, sizes);
  const Pieces<int32_t> numbers = arena.take_each<int32_t>(in.threads, in.slots);
  if (!arena.base) return arena.used;
  over_listed(
      in,
      [&](int64_t bh) {
        heads.sort(in, bh);
        for (int64_t i = 0; i < in.N; i++) a.lse[bh * in.N + i] = -__builtin_inff();
        zero_others(in, a.out, bh, in.E);
      },
      [&](int64_t bh, int64_t c, int thread) { listed_members(a, heads, bh, c, numbers[thread], scratch.of[thread]); });
  return arena.used;
}

static void listed_members_backward(const ListedBackward &a, const ListedHeads &heads, int64_t bh, int64_t c,
                                    int32_t *numbers, const TailGradScratch &own) {
  const ListedInputs &in = a.inputs;
  const int32_t *order = heads.order[bh], *bounds = heads.offsets[bh] + c;
  const int64_t b = bh / in.H, h = bh % in.H, D = round_up(in.D, W), E = round_up(in.E, W);
  if (bounds[0] == bounds[1]) return;
  const int64_t K = pack_listed(in, bh, c, own.met, numbers), lanes = round_up(K, W);
  if (!K) zero_members(heads, in, a.grad_query, bh, c, in.D);
  pack_across(lanes, in.E, own.values, lanes, [&](int64_t i) { return own.met.value_rows[i]; });
  zero(own.bias, lanes);
  zero(own.of_keys, K * D);
  zero(own.of_values, K * E);
  float *of_queries = own.grad_keys;  // as large as a tile of members
  for (int64_t first = bounds[0]; K && first < bounds[1]; first += MEMBER_TILE) {
    const int64_t count = bounds[1] - first < MEMBER_TILE ? bounds[1] - first : MEMBER_TILE;
    pack_rows<float>(in.query, b, h, order, first, count, in.D, own.queries, D);
    if (a.grad_out.data) pack_rows<float>(a.grad_out, b, h, order, first, count, in.E, own.grads, E);
    else zero(own.grads, count * E);
    for (int64_t i = 0; i < count; i++) own.lse[i] = a.grad_lse ? a.grad_lse[bh * in.N + order[first + i]] : 0;
    met_tile_backward(count, K, in.D, in.E, own, of_queries,
                      [&](int64_t lanes) { tail_softmax_gradient(count, lanes, in.scale, own); });
    for (int64_t i = 0; i < count; i++) {
      for (int64_t d = 0; d < D; d++) of_queries[i * D + d] *= in.scale;
      store_row(of_queries + i * D, in.D, row_of<float>(a.grad_query, b, h, order[first + i]));
    }
  }
  for (int64_t k = 0; k < K; k++) {
    float *of_key = row_of<float>(a.grad_key, b, h, numbers[k]), *of_value = row_of<float>(a.grad_value, b, h, numbers[k]);
    for (int64_t d = 0; d < in.D; d++) of_key[d] += own.of_keys[k * D + d] * in.scale;
    for (int64_t e = 0; e < in.E; e++) of_value[e] += own.of_values[k * E + e];
    a.grad_bias[bh * in.rows + numbers[k]] += own.bias[k];
  }
}

static int64_t listed_backward(const ListedBackward &a, void *workspace) {
  static_assert(KEY_TILE >= MEMBER_TILE);
  const ListedInputs &in = a.inputs;
  const TailInputs sizes = sizes_of(in);
  Arena arena{(char *)workspace};
  const ListedHeads heads(arena, in);
  const PerThread<TailGradScratch> scratch(arena, in.threads, sizes);
  const Pieces<int32_t> numbers = arena.take_each<int32_t>(in.threads, in.slots);
  if (!arena.base) return arena.used;
  over_listed(
      in,
      [&](int64_t bh) {
        const int64_t b = bh / in.H, h = bh % in.H;
        heads.sort(in, bh);
        zero_others(in, a.grad_query, bh, in.D);
        zero_rows(a.grad_key, b, h, in.rows, in.D);
        zero_rows(a.grad_value, b, h, in.rows, in.E);
        zero(a.grad_bias + bh * in.rows, in.rows);
      },
      [&](int64_t bh, int64_t c, int thread) {
        listed_members_backward(a, heads, bh, c, numbers[thread], scratch.of[thread]);
      });
  return arena.used;
}
