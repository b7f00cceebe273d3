// Which keys the queries of exact attention see, and how what a query gets is written.

constexpr int64_t EXACT_QUERIES = 64;  // of a tile

// How many of the keys, in ascending order, a query at this position sees.
static int64_t seen_keys(const ExactInputs &in, const Positions &keys, int64_t query) {
  if (!in.causal) return keys.count;
  const int64_t last = query + in.offset;
  int64_t low = 0, high = keys.count;  // the first key behind `last` is in [low, high]
  if (!keys.at) return last + 1 < 0 ? 0 : last + 1 < high ? last + 1 : high;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] <= last) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Whether there is such a query, and sees a key.
static bool meets_keys(const ExactInputs &in, int64_t b, const Positions &keys, int64_t query) {
  return !(in.query_valid && !in.query_valid[b * in.N + query]) && seen_keys(in, keys, query) > 0;
}

// Whether all of these queries are padding.
static bool is_padding(const ExactInputs &in, int64_t b, int64_t first, int64_t count) {
  bool any = !in.query_valid;
  for (int64_t i = first; !any && i < first + count; i++) any = in.query_valid[b * in.N + i] != 0;
  return !any;
}

// How many of the first lanes do not see this key.
static int64_t hidden_lanes(const ExactInputs &in, const Positions &keys, int64_t key, int64_t first_query) {
  const int64_t before = keys[key] - in.offset - first_query;
  return before < 0 ? 0 : before;
}

// Logits of keys that only the later queries see: −∞ for the others.
static void hide_later(const ExactInputs &in, const Positions &keys, int64_t first, int64_t count, int64_t first_query,
                       int64_t lanes, float *logits) {
  vi ramp;
  for (int lane = 0; lane < W; lane++) ramp[lane] = lane;
  for (int64_t j = 0; j < count; j++) {
    const int64_t hidden = hidden_lanes(in, keys, first + j, first_query);
    for (int64_t v = 0; v < lanes && v < hidden; v += W) {
      float *row = logits + j * lanes + v;
      store(row, select(ramp + (int32_t)v < (int32_t)hidden, splat(-__builtin_inff()), load(row)));
    }
  }
}

// A query's output and log-sum-exp, from the sums of its weighted values (whole vectors) and of its weights.
template <class T>
static void write_query(const ExactForward &a, int64_t b, int64_t h, const Positions &keys, int64_t query, float highest,
                        float total, float *sums) {
  const ExactInputs &in = a.inputs;
  const float log_total = __builtin_logf(total * GROWN);
  const bool none = !meets_keys(in, b, keys, query);
  for (int64_t e = 0; e < in.E; e += W) store(sums + e, none ? vf{} : load(sums + e) / total);
  store_row(sums, in.E, row_of<T>(a.out, b, h, query));
  const int64_t at = (b * in.H + h) * in.N + query;
  a.lse[at] = none || total == 0 ? -__builtin_inff() : highest + log_total;
  a.residual[at] = residual_of(a.lse[at], highest, log_total);
}
