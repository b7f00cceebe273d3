// The gradients of attention inside buckets, from its output and log-sum-exp:
//
//     w_ij = e^{s_ij − lse_i}      ds_ij = w_ij (dO_i·V_j − δ_i + dlse_i)      δ_i = dO_i·O_i
//     dQ_i = scale Σ ds_ij K_j     dK_j = scale Σ ds_ij Q_i     dV_j = Σ w_ij dO_i     db_j = Σ ds_ij
//     the term of a distance: Σ ds_ij over the pairs that have it
//
// As forwards, every slot of a query and of a key has a place of its own for what it gets, and a token's places are
// added in their order. Terms of a distance have a row of places for each slot of a query, or one for each bucket where
// all queries share them.

constexpr int64_t MOST_PARTS = 4;  // tasks per bucket with many keys; each has places of its own for the queries

struct BucketGradients {
  Listing queries, keys;
  int64_t parts;
  float *delta, *of_lse;       // (N): δ, dlse
  float *lse, *residual;       // (N)
  float *of_queries;           // (parts,query slots,D')
  float *of_keys, *of_values;  // (key slots,D'), (key slots,E')
  float *of_bias;              // (key slots)
  float *of_terms;             // (query slots, or buckets; distances)
  int64_t query_slots;

  BucketGradients(Arena &arena, const BucketInputs &in, const Extent &all)
      : queries(arena, all.queries, all.buckets, in.N), keys(arena, all.keys, all.buckets, in.M) {
    const int64_t D = round_up(in.D, W), whole = (all.most_keys + BUCKET_KEYS - 1) / BUCKET_KEYS;
    parts = whole < 1 || in.of_distance.data ? 1 : whole < MOST_PARTS ? whole : MOST_PARTS;
    query_slots = all.queries;
    delta = arena.take<float>(in.N);
    of_lse = arena.take<float>(in.N);
    lse = arena.take<float>(in.N);
    residual = arena.take<float>(in.N);
    of_queries = arena.take<float>(parts * query_slots * D);
    of_keys = arena.take<float>(all.keys * D);
    of_values = arena.take<float>(all.keys * round_up(in.E, W));
    of_bias = arena.take<float>(all.keys);
    const int64_t rows = in.distance_rows == 1 ? all.buckets : all.queries;
    of_terms = arena.take<float>(in.of_distance.data ? rows * in.distances : 0);
  }

  // The row for what a query of a bucket adds to the terms of its distances.
  float *terms_of(const BucketInputs &in, int64_t bucket, int64_t slot) const {
    return of_terms + (in.distance_rows == 1 ? bucket : slot) * in.distances;
  }

  void list(const BucketBackward &a, int64_t bh, const Extent &all) const {
    const BucketInputs &in = a.inputs;
    list_keys(in.sets, bh, in.M, keys);
    keys.find_places(all.buckets, in.M);
    list_queries(in.sets, bh, in.N, all.buckets, queries);
    queries.find_places(all.buckets, in.N);
    for (int64_t i = 0; i < in.N; i++) {
      const float of_row = a.lse[bh * in.N + i];
      of_lse[i] = a.grad_lse ? a.grad_lse[bh * in.N + i] : 0;
      delta[i] = 0;
      if (a.grad_out.data)
        delta[i] = dot(row_of<float>(a.grad_out, bh / in.H, bh % in.H, i),
                       row_of<float>(a.out, bh / in.H, bh % in.H, i), in.E);
      // Of no key: all weights are 0. Of keys with logits of −∞ alone, whose output is NaN: so are they.
      const float both = delta[i] - of_lse[i], none = both == both ? __builtin_inff() : both;
      residual[i] = a.residual[bh * in.N + i];
      lse[i] = of_row == -__builtin_inff() ? none : of_row;
    }
  }
};

struct BucketGradScratch {
  float *key_rows, *keys, *value_rows, *values;  // a chunk of keys: rows and transposed
  float *bias, *of_bias;
  int32_t *numbers;
  float *queries, *grads, *weights, *products;  // a tile of queries

  BucketGradScratch(Arena &arena, const BucketInputs &in, const Extent &all) {
    const int64_t K = round_up(all.most_keys < BUCKET_KEYS ? all.most_keys : BUCKET_KEYS, W);
    const int64_t D = round_up(in.D, W), E = round_up(in.E, W);
    key_rows = arena.take<float>(K * D);
    keys = arena.take<float>(in.D * K);
    value_rows = arena.take<float>(K * E);
    values = arena.take<float>(in.E * K);
    bias = arena.take<float>(K);
    of_bias = arena.take<float>(K);
    numbers = arena.take<int32_t>(K);
    queries = arena.take<float>(QUERY_TILE * D);
    grads = arena.take<float>(QUERY_TILE * E);
    weights = arena.take<float>(QUERY_TILE * K);
    products = arena.take<float>(QUERY_TILE * K);
  }
};

// Adds W keys' ds to the row of their distances.
static void add_to_terms(const Terms &terms, vf ds, const int32_t *numbers, float *to) {
  for (int64_t l = 0; l < W; l++)
    if (terms.place(numbers[l]) < (uint64_t)terms.count) to[terms.place(numbers[l])] += ds[l];
}

// weights ← w; products ← scale·ds; adds ds to the gradient of the bias. Pairs that do not see each other have 0, also
// where the row or the value is NaN.
static void weights_backward(const BucketBackward &a, int64_t b, int64_t h, int64_t bucket, int64_t span, int64_t first,
                             int64_t count, int64_t lanes, const BucketGradients &head, const BucketGradScratch &own) {
  const BucketInputs &in = a.inputs;
  const bool all = sees_all(in, span);
  const int64_t E = round_up(in.E, W);
  const int32_t *queries = head.queries.tokens + first;
  for (int64_t i = 0; i < count; i++) {
    const Seen seen = seen_by(in, span, b, h, queries[i]);
    const Terms terms(in, span, b, h, queries[i]);
    const float lse = head.lse[queries[i]], residual = head.residual[queries[i]];
    const float delta = head.delta[queries[i]], of_lse = head.of_lse[queries[i]];
    vi any = vi{} - (all ? 1 : 0);
    for (int64_t j = 0; j < lanes; j += W) {
      float *weights = own.weights + i * lanes + j, *products = own.products + i * lanes + j;
      const vf more = terms.of ? terms_of(terms, own.numbers + j) : vf{};
      const vf logits = visible_logits(weights, in.scale, own.bias + j, own.numbers + j, nullptr) + more;
      vf w = exp_nonpositive((logits - lse) - residual);
      vf ds = w * ((load(products) - delta) + of_lse);  // 0 + dlse where w is 1
      if (!all) {
        const vi visible = visible_keys(own.numbers + j, seen) & not_minus_infinity(more);
        w = (vf)(visible & (vi)w), ds = (vf)(visible & (vi)ds), any |= visible;
      }
      if (terms.of) add_to_terms(terms, ds, own.numbers + j, head.terms_of(in, bucket, first + i));
      store(weights, w);
      store(products, ds * in.scale);
      store(own.of_bias + j, load(own.of_bias + j) + ds);
    }
    if ((delta != delta || of_lse != of_lse) && all_set(any == 0)) zero(own.grads + i * E, E);  // which no value may get
  }
}

// A tile of a bucket's queries and the chunk of its keys that is packed, whose slots start at `slot`.
static void tile_backward(const BucketBackward &a, int64_t b, int64_t h, int64_t bucket, int64_t span, int64_t first,
                          int64_t count, int64_t slot, int64_t keys, int64_t part, bool add,
                          const BucketGradients &head, const BucketGradScratch &own) {
  const BucketInputs &in = a.inputs;
  const int64_t lanes = round_up(keys, W), D = round_up(in.D, W), E = round_up(in.E, W);
  const int32_t *queries = head.queries.tokens;
  pack_rows<float>(in.query, b, h, queries, first, count, in.D, own.queries, D);
  if (a.grad_out.data)
    pack_rows<float>(a.grad_out, b, h, queries, first, count, in.E, own.grads, E);
  else
    zero(own.grads, count * E);
  gemm(count, lanes, in.D, own.queries, D, 1, own.keys, lanes, own.weights, lanes, false);
  gemm(count, lanes, in.E, own.grads, E, 1, own.values, lanes, own.products, lanes, false);
  weights_backward(a, b, h, bucket, span, first, count, lanes, head, own);
  gemm(count, D, keys, own.products, lanes, 1, own.key_rows, D, head.of_queries + (part * head.query_slots + first) * D,
       D, add);
  gemm(keys, D, count, own.products, 1, lanes, own.queries, D, head.of_keys + slot * D, D, true);
  gemm(keys, E, count, own.weights, 1, lanes, own.grads, E, head.of_values + slot * E, E, true);
}

// One part of a bucket's keys, with all queries of the bucket.
static void part_backward(const BucketBackward &a, int64_t b, int64_t h, int64_t bucket, int64_t part,
                          const BucketGradients &head, const BucketGradScratch &own) {
  const BucketInputs &in = a.inputs;
  const int64_t g = h / (in.H / in.G), D = round_up(in.D, W), E = round_up(in.E, W), all = head.keys.size(bucket);
  const int64_t share = round_up((all + head.parts - 1) / head.parts, BUCKET_KEYS);
  const int64_t span = span_of(in.sets, bucket), start = part * share, end = start + share < all ? start + share : all;
  const int64_t queries = head.queries.starts[bucket], of_it = head.queries.size(bucket);
  if (in.of_distance.data)
    zero(head.terms_of(in, bucket, queries), (in.distance_rows == 1 ? 1 : of_it) * in.distances);
  if (start >= end) return zero(head.of_queries + (part * head.query_slots + queries) * D, of_it * D);
  for (int64_t at = start; at < end; at += BUCKET_KEYS) {
    const int64_t count = end - at < BUCKET_KEYS ? end - at : BUCKET_KEYS, slot = head.keys.starts[bucket] + at;
    const int32_t *keys = head.keys.tokens + slot;
    zero(head.of_keys + slot * D, count * D);
    zero(head.of_values + slot * E, count * E);
    zero(own.of_bias, round_up(count, W));
    if (of_it > 0) {
      pack_both_ways(in.key, b, g, keys, count, in.D, own.key_rows, own.keys);
      pack_both_ways(in.value, b, g, keys, count, in.E, own.value_rows, own.values);
      pack_numbers(keys, count, in.key_bias ? in.key_bias + (b * in.H + h) * in.M : nullptr, own.numbers, own.bias);
    }
    for (int64_t i = 0; i < of_it; i += QUERY_TILE)
      tile_backward(a, b, h, bucket, span, queries + i, of_it - i < QUERY_TILE ? of_it - i : QUERY_TILE, slot, count,
                    part, at > start, head, own);
    for (int64_t j = 0; j < count; j++) head.of_bias[slot + j] = own.of_bias[j];
  }
}

static void add_rows(const float *rows, const int32_t *places, int64_t count, int64_t width, int64_t row, float *to) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < width; d++) to[d] += rows[places[i] * row + d];
}

// Queries [from, to): what their places hold, in order.
static void sum_queries(const BucketBackward &a, int64_t b, int64_t h, int64_t from, int64_t to,
                        const BucketGradients &head) {
  const BucketInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W);
  for (int64_t query = from; query < to; query++) {
    const int32_t first = head.queries.firsts[query], count = head.queries.firsts[query + 1] - first;
    float *row = row_of<float>(a.grad_query, b, h, query);
    zero(row, in.D);
    for (int64_t part = 0; part < head.parts; part++)
      add_rows(head.of_queries + part * head.query_slots * D, head.queries.places + first, count, in.D, D, row);
    if (!in.of_distance.data || in.distance_rows == 1) continue;
    float *terms = row_of<float>(a.grad_of_distance, b, h, query);
    zero(terms, in.distances);
    add_rows(head.of_terms, head.queries.places + first, count, in.distances, in.distances, terms);
  }
}

// The terms that all queries share: what the buckets hold, in order.
static void sum_terms(const BucketBackward &a, int64_t b, int64_t h, int64_t buckets, const BucketGradients &head) {
  const int64_t distances = a.inputs.distances;
  float *to = row_of<float>(a.grad_of_distance, b, h, 0);
  zero(to, distances);
  for (int64_t bucket = 0; bucket < buckets; bucket++)
    for (int64_t p = 0; p < distances; p++) to[p] += head.of_terms[bucket * distances + p];
}

// Keys [from, to) of one key head: what their places hold in all query heads of its group, in order.
static void sum_keys(const BucketBackward &a, int64_t b, int64_t g, int64_t from, int64_t to,
                     const BucketGradients *heads) {
  const BucketInputs &in = a.inputs;
  const int64_t group = in.H / in.G;
  for (int64_t key = from; key < to; key++) {
    float *of_key = row_of<float>(a.grad_key, b, g, key), *of_value = row_of<float>(a.grad_value, b, g, key);
    zero(of_key, in.D);
    zero(of_value, in.E);
    for (int64_t i = 0; i < group; i++) {
      const BucketGradients &head = heads[i];
      const int32_t first = head.keys.firsts[key], count = head.keys.firsts[key + 1] - first;
      add_rows(head.of_keys, head.keys.places + first, count, in.D, round_up(in.D, W), of_key);
      add_rows(head.of_values, head.keys.places + first, count, in.E, round_up(in.E, W), of_value);
      if (!a.grad_key_bias) continue;
      float *of_bias = a.grad_key_bias + (b * in.H + g * group + i) * in.M + key;
      *of_bias = 0;
      add_rows(head.of_bias, head.keys.places + first, count, 1, 1, of_bias);
    }
  }
}

static int64_t bucket_backward(const BucketBackward &a, void *workspace) {
  const BucketInputs &in = a.inputs;
  const Extent all(in.sets);
  Arena arena{(char *)workspace}, one{nullptr};
  const BucketGradients sized(one, in, all);
  const int64_t group = in.H / in.G, groups = in.B * in.G;
  const int64_t wave = heads_at_once(groups, in.threads, one.used * group);
  BucketGradients *heads = arena.take<BucketGradients>(wave * group);
  for (int64_t i = 0; i < wave * group; i++) {
    const BucketGradients head(arena, in, all);
    if (arena.base) heads[i] = head;
  }
  const PerThread<BucketGradScratch> scratch(arena, in.threads, in, all);
  if (!arena.base) return arena.used;

  const int64_t tasks = all.buckets * sized.parts, ranges = (in.N + MERGED - 1) / MERGED;
  const int64_t key_ranges = (in.M + MERGED - 1) / MERGED;
  for (int64_t first = 0; first < groups; first += wave) {
    const int64_t now = groups - first < wave ? groups - first : wave;
    auto head_of = [&](int64_t i) { return first / in.G * in.H + first % in.G * group + i; };  // heads of a wave adjoin
    const Stage listing = {now * group, [&](int64_t i, int) { heads[i].list(a, head_of(i), all); }};
    const Stage buckets = {now * group * tasks, [&](int64_t task, int thread) {
      const int64_t i = task / tasks, bh = head_of(i), bucket = task % tasks / sized.parts;
      part_backward(a, bh / in.H, bh % in.H, bucket, task % sized.parts, heads[i], scratch.of[thread]);
    }};
    const Stage over_queries = {now * group * ranges, [&](int64_t task, int) {
      const int64_t i = task / ranges, bh = head_of(i), from = task % ranges * MERGED;
      sum_queries(a, bh / in.H, bh % in.H, from, from + MERGED < in.N ? from + MERGED : in.N, heads[i]);
      if (from == 0 && in.of_distance.data && in.distance_rows == 1)
        sum_terms(a, bh / in.H, bh % in.H, all.buckets, heads[i]);
    }};
    const Stage over_keys = {now * key_ranges, [&](int64_t task, int) {
      const int64_t i = task / key_ranges, from = task % key_ranges * MERGED;
      sum_keys(a, (first + i) / in.G, (first + i) % in.G, from, from + MERGED < in.M ? from + MERGED : in.M,
               heads + i * group);
    }};
    parallel_stages(in.threads, listing, buckets, over_queries, over_keys);
  }
  return arena.used;
}
