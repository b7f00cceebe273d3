// Partials of windows of queries, merged for each query: out = Σ_p e^{lse_p − lse} out_p, lse = ln Σ_p e^{lse_p}.

constexpr int64_t MERGED_QUERIES = 64;  // of a task

// The row of a partial that is of this query, in item `b`; −1 where no window holds it.
struct PartRow {
  int64_t item, row;
};

static PartRow row_of_part(const MergedPart &part, int64_t b, int64_t query) {
  const int64_t from = query - part.first, window = part.windows == 1 ? 0 : from / part.step, at = from - window * part.step;
  if (from < 0 || window >= part.windows || at >= part.queries) return {-1, 0};
  return {b * part.windows + window, at};
}

struct MergeRow {
  float *row, *sum;  // (E') a row of a partial, and the sum

  MergeRow(Arena &arena, const Merging &a) {
    row = arena.take<float>(round_up(a.E, W));
    sum = arena.take<float>(round_up(a.E, W));
  }
};

template <class T>
static void merge_query_of(const Merging &a, int64_t b, int64_t h, int64_t query, const MergeRow &own) {
  const int64_t E = round_up(a.E, W);
  float high = -__builtin_inff(), total = 0;
  auto each = [&](auto &&run) {
    for (const MergedPart &part : a.parts) {
      const PartRow at = row_of_part(part, b, query);
      if (at.item < 0) continue;
      const float lse = part.lse[(at.item * a.H + h) * part.queries + at.row];
      if (lse != -__builtin_inff()) run(part, at, lse);
    }
  };
  each([&](const MergedPart &, const PartRow &, float lse) {
    high = lse > high || lse != lse ? lse : high;  // NaN stays
  });
  each([&](const MergedPart &, const PartRow &, float lse) { total += __builtin_expf(lse - high); });
  zero(own.sum, E);
  each([&](const MergedPart &part, const PartRow &at, float lse) {
    const float share = __builtin_expf(lse - high) / total;
    load_row(row_of<T>(part.out, at.item, h, at.row), a.E, own.row, E);
    for (int64_t e = 0; e < E; e += W) store(own.sum + e, load(own.sum + e) + share * load(own.row + e));
  });
  if (a.rounded) store_row(own.sum, a.E, row_of<T>(a.out, b, h, query));
  else store_row(own.sum, a.E, row_of<float>(a.out, b, h, query));
  a.lse[(b * a.H + h) * a.N + query] = high == -__builtin_inff() ? high : high + __builtin_logf(total);
}

static int64_t merge_windows(const Merging &a, void *workspace) {
  Arena arena{(char *)workspace};
  const PerThread<MergeRow> scratch(arena, a.threads, a);
  if (!arena.base) return arena.used;
  const int64_t blocks = (a.N + MERGED_QUERIES - 1) / MERGED_QUERIES;
  return by_dtype(a.dtype, [&](auto x) {
    parallel_for(a.threads, a.B * blocks, [&](int64_t task, int thread) {
      const int64_t b = task / blocks, first = task % blocks * MERGED_QUERIES;
      for (int64_t query = first; query < first + MERGED_QUERIES && query < a.N; query++)
        for (int64_t h = 0; h < a.H; h++)  // of one query they adjoin
          merge_query_of<decltype(x)>(a, b, h, query, scratch.of[thread]);
    });
    return arena.used;
  });
}
