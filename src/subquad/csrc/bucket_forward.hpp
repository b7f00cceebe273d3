// Attention inside buckets, merged by log-sum-exp over the buckets that a query is in.
//
// Every bucket packs its keys and values once for up to QUERY_RUN of its queries. What a query gets there stays in a
// slot of its own, and its slots are merged in their order: results do not depend on which thread did what.
//
//     listing     per head: buckets as lists, and runs of queries that share a bucket
//     attention   per run: a tile of queries against up to BUCKET_KEYS keys at a time, into the queries' slots
//     merging     per query: its slots, which its places in the listing name
//
// Weights are 2^−SHRUNK of what they are, so that no sum of values overflows whose mean does not. A query that sees
// keys, all with logits of −∞, has an output of NaN, as softmax does; one that sees none has 0.

constexpr int64_t QUERY_RUN = 384;    // queries per task
constexpr int64_t QUERY_TILE = 48;    // rows per product
constexpr int64_t BUCKET_KEYS = 512;  // keys packed at a time
constexpr int64_t MERGED = 256;       // queries per merging task

struct QueryRun {
  int32_t bucket, first, count;  // queries [first, first + count) of the listing
};

struct BucketHead {
  Listing queries, keys;
  QueryRun *runs;
  int64_t run_count, most_runs, width;
  float *out;               // (slots,E') 2^−SHRUNK Σ e^{logit − highest} V
  float *highest, *total;   // (slots)

  BucketHead(Arena &arena, const BucketInputs &in, const Extent &all)
      : queries(arena, all.queries, all.buckets, in.N), keys(arena, all.keys, all.buckets, in.M) {
    run_count = 0;
    most_runs = all.queries / QUERY_RUN + all.buckets;
    width = round_up(in.E, W);
    runs = arena.take<QueryRun>(most_runs);
    out = arena.take<float>(all.queries * width);
    highest = arena.take<float>(all.queries);
    total = arena.take<float>(all.queries);
  }

  void list(const BucketInputs &in, int64_t bh, const Extent &all) {
    list_keys(in.sets, bh, in.M, keys);
    list_queries(in.sets, bh, in.N, all.buckets, queries);
    queries.find_places(all.buckets, in.N);
    run_count = 0;
    for (int64_t c = 0; c < all.buckets; c++)
      for (int64_t first = queries.starts[c], end = queries.starts[c + 1]; first < end; first += QUERY_RUN)
        runs[run_count++] = {(int32_t)c, (int32_t)first,
                                     (int32_t)(end - first < QUERY_RUN ? end - first : QUERY_RUN)};
  }
};

struct BucketScratch {
  float *rows;      // (K',D') for the transposition
  float *keys;      // (D,K') transposed
  float *values;    // (K,E')
  float *bias;      // (K')
  int32_t *numbers; // (K')
  float *queries;   // (QUERY_TILE,D)
  float *weights;   // (QUERY_TILE,K')

  BucketScratch(Arena &arena, const BucketInputs &in, const Extent &all) {
    const int64_t K = round_up(all.most_keys < BUCKET_KEYS ? all.most_keys : BUCKET_KEYS, W), D = round_up(in.D, W);
    rows = arena.take<float>(K * D);
    keys = arena.take<float>(in.D * K);
    values = arena.take<float>(K * round_up(in.E, W));
    bias = arena.take<float>(K);
    numbers = arena.take<int32_t>(K);
    queries = arena.take<float>(QUERY_TILE * in.D);
    weights = arena.take<float>(QUERY_TILE * K);
  }
};

// Rows of a chunk of keys (count',width'), with zeros to whole vectors both ways, and the same transposed.
static void pack_both_ways(const Rows &from, int64_t b, int64_t g, const int32_t *keys, int64_t count, int64_t width,
                           float *rows, float *transposed) {
  const int64_t lanes = round_up(count, W), padded = round_up(width, W);
  pack_rows<float>(from, b, g, keys, 0, count, width, rows, padded);
  zero(rows + count * padded, (lanes - count) * padded);
  pack_transposed(rows, lanes, width, padded, transposed, lanes);
}

// A row of products to 2^−SHRUNK e^{logit − highest}, with the running maximum and sum. Returns the factor that brings
// older sums to the new maximum.
static float online_row(float *row, int64_t lanes, float scale, const BucketScratch &own, const Seen *seen,
                        const Terms &terms, float *highest_so_far, float *total) {
  vf high = splat(*highest_so_far), sums = {};
  for (int64_t j = 0; j < lanes; j += W) {
    vf logits = visible_logits(row + j, scale, own.bias + j, own.numbers + j, seen);
    if (terms.of) {
      const vf more = terms_of(terms, own.numbers + j);
      logits = select(not_minus_infinity(more), logits + more, splat(-__builtin_inff()));
    }
    store(row + j, logits);
    high = maximum(logits, high);
  }
  const float before = *highest_so_far, now = highest(high), base = now == -__builtin_inff() ? 0 : now;
  for (int64_t j = 0; j < lanes; j += W) {
    const vf p = exp_nonpositive<SHRUNK>(load(row + j) - base);
    sums += p;
    store(row + j, p);
  }
  const float shrink = before == now ? 1 : __builtin_expf(before - base);
  *highest_so_far = now;
  *total = *total * shrink + sum(sums);
  return shrink;
}

// A tile of queries over the keys that are packed.
static void attend_tile(const BucketForward &a, int64_t b, int64_t h, int64_t span, int64_t first, int64_t count,
                        int64_t keys, bool add, const BucketHead &head, const BucketScratch &own) {
  const BucketInputs &in = a.inputs;
  const int64_t lanes = round_up(keys, W), width = head.width;
  const bool all = sees_all(in, span);
  pack_rows<float>(in.query, b, h, head.queries.tokens, first, count, in.D, own.queries, in.D);
  gemm(count, lanes, in.D, own.queries, in.D, 1, own.keys, lanes, own.weights, lanes, false);
  for (int64_t i = 0; i < count; i++) {
    const Seen seen = seen_by(in, span, b, h, head.queries.tokens[first + i]);
    const Terms terms(in, span, b, h, head.queries.tokens[first + i]);
    const float shrink = online_row(own.weights + i * lanes, lanes, in.scale, own, all ? nullptr : &seen, terms,
                                    head.highest + first + i, head.total + first + i);
    float *out = head.out + (first + i) * width;
    for (int64_t e = 0; add && shrink != 1 && e < width; e++) out[e] *= shrink;
  }
  gemm(count, width, keys, own.weights, lanes, 1, own.values, width, head.out + first * width, width, add);
}

// A run of queries over all keys of its bucket. Only the first chunk of keys overwrites what the slots hold.
static void attend_run(const BucketForward &a, int64_t b, int64_t h, const BucketHead &head, const QueryRun &of,
                           const BucketScratch &own) {
  const BucketInputs &in = a.inputs;
  const int64_t g = h / (in.H / in.G), all = head.keys.size(of.bucket), span = span_of(in.sets, of.bucket);
  const int32_t *keys = head.keys.tokens + head.keys.starts[of.bucket];
  for (int64_t i = of.first; i < of.first + of.count; i++) {
    head.highest[i] = -__builtin_inff();
    head.total[i] = 0;
  }
  for (int64_t at = 0; at < all; at += BUCKET_KEYS) {
    const int64_t count = all - at < BUCKET_KEYS ? all - at : BUCKET_KEYS;
    pack_both_ways(in.key, b, g, keys + at, count, in.D, own.rows, own.keys);
    pack_rows<float>(in.value, b, g, keys + at, 0, count, in.E, own.values, head.width);
    pack_numbers(keys + at, count, in.key_bias ? in.key_bias + (b * in.H + h) * in.M : nullptr, own.numbers, own.bias);
    for (int64_t i = 0; i < of.count; i += QUERY_TILE)
      attend_tile(a, b, h, span, of.first + i, of.count - i < QUERY_TILE ? of.count - i : QUERY_TILE, count, at > 0,
                  head, own);
  }
}

// Whether a query sees any of its buckets' keys.
static bool sees_any(const BucketInputs &in, int64_t b, int64_t h, int64_t query, const BucketHead &head) {
  const int32_t *place = head.queries.places + head.queries.firsts[query];
  const int32_t *end = head.queries.places + head.queries.firsts[query + 1];
  for (int64_t bucket = 0; place < end; place++) {  // places ascend, as the buckets do in which they are
    while (head.queries.starts[bucket + 1] <= *place) bucket++;
    const Seen seen = seen_by(in, span_of(in.sets, bucket), b, h, query);
    const Terms terms(in, span_of(in.sets, bucket), b, h, query);
    for (int64_t j = head.keys.starts[bucket]; j < head.keys.starts[bucket + 1]; j++) {
      const int32_t key = head.keys.tokens[j];
      const bool hidden = key < seen.low || key > seen.high || key == seen.self || (seen.hidden && seen.hidden[key]) ||
                          (terms.of && terms[key] == -__builtin_inff());
      if (!hidden) return true;
    }
  }
  return false;
}

// One query's slots together; one that saw no key has total 0 and is skipped.
static void merge_query(const BucketForward &a, int64_t b, int64_t h, int64_t query, const BucketHead &head) {
  const BucketInputs &in = a.inputs;
  const int32_t *place = head.queries.places + head.queries.firsts[query];
  const int32_t *end = head.queries.places + head.queries.firsts[query + 1];
  float *to = row_of<float>(a.out, b, h, query), high = -__builtin_inff(), total = 0;
  for (const int32_t *at = place; at < end; at++) high = head.highest[*at] > high ? head.highest[*at] : high;
  for (int64_t e = 0; e < in.E; e++) to[e] = 0;
  for (const int32_t *at = place; at < end; at++) {
    if (head.total[*at] == 0) continue;
    const float share = head.highest[*at] == high ? 1 : __builtin_expf(head.highest[*at] - high);
    const float *out = head.out + *at * head.width;
    total += share * head.total[*at];
    for (int64_t e = 0; e < in.E; e++) to[e] += share * out[e];
  }
  const int64_t at = (b * in.H + h) * in.N + query;
  const float log_total = __builtin_logf(total * GROWN);
  a.lse[at] = total == 0 ? -__builtin_inff() : high + log_total;
  a.residual[at] = residual_of(a.lse[at], high, log_total);
  const float nothing = place < end && total == 0 && sees_any(in, b, h, query, head) ? __builtin_nanf("") : 0;
  for (int64_t e = 0; e < in.E; e++) to[e] = total == 0 ? nothing : to[e] / total;
}

static int64_t bucket_forward(const BucketForward &a, void *workspace) {
  const BucketInputs &in = a.inputs;
  const Extent all(in.sets);
  Arena arena{(char *)workspace}, one{nullptr};
  const BucketHead sized(one, in, all);
  const int64_t heads = in.B * in.H, wave = heads_at_once(heads, in.threads, one.used);
  BucketHead *of = arena.take<BucketHead>(wave);
  for (int64_t i = 0; i < wave; i++) {
    const BucketHead head(arena, in, all);
    if (arena.base) of[i] = head;
  }
  const PerThread<BucketScratch> scratch(arena, in.threads, in, all);
  if (!arena.base) return arena.used;

  const int64_t merges = (in.N + MERGED - 1) / MERGED;
  for (int64_t first = 0; first < heads; first += wave) {
    const int64_t now = heads - first < wave ? heads - first : wave;
    const Stage listing = {now, [&](int64_t i, int) { of[i].list(in, first + i, all); }};
    const Stage attention = {now * sized.most_runs, [&](int64_t task, int thread) {
      const int64_t i = task / sized.most_runs, run = task % sized.most_runs, bh = first + i;
      if (run < of[i].run_count)
        attend_run(a, bh / in.H, bh % in.H, of[i], of[i].runs[run], scratch.of[thread]);
    }};
    const Stage merging = {now * merges, [&](int64_t task, int) {
      const int64_t i = task / merges, bh = first + i, start = task % merges * MERGED;
      for (int64_t query = start; query < start + MERGED && query < in.N; query++)
        merge_query(a, bh / in.H, bh % in.H, query, of[i]);
    }};
    parallel_stages(in.threads, listing, attention, merging);
  }
  return arena.used;
}
