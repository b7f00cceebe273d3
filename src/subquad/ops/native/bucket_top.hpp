// Balanced selection: of each column of scores the tokens that are largest in it, ties going to the lower token.
//
// W columns are scanned at once. A bound from a sample lets few values through; those become candidates, of which the
// best are kept whenever their room is full. The sample only saves work: a column that it misled is scanned again.

constexpr int64_t ROWS_OF_TASK = 256;
constexpr int64_t SCAN_TILE = 64;  // tokens, so that what lies between the columns of a row is read soon after
constexpr int64_t LEAST_SAMPLE = 1024, SAMPLE_SHARE = 16;
constexpr int64_t MOST_VECTORS = 4;  // of columns in a task

// How a token's scores x are ranked: by x − total, but the one that equals `top` by `odds`. With the logits' softmax p
// that is ln p up to ½, and above it ln(p/(1 − p)), of which a token has one at most: the order of ln(p/(1 − p)), and
// exact where p rounds to 1.
struct Ranking {
  float total, top, odds;
};

static inline vf load_some(const float *from, int64_t count, float otherwise) {
  if (count >= W) return load(from);
  float lanes[W];
  for (int64_t i = 0; i < W; i++) lanes[i] = i < count ? from[i] : otherwise;
  return load(lanes);
}

// A row's largest value; where its softmax is asked for, the ranking by that.
static Ranking rank_row(const float *row, int64_t count, bool odds, float *largest) {
  const float none = -__builtin_inff();
  vf first = splat(none), second = first;  // in each lane
  for (int64_t j = 0; j < count; j += W) {
    const vf x = load_some(row + j, count - j, none);
    second = maximum(select(x > first, first, x), second);
    first = maximum(x, first);
  }
  const float top = *largest = highest(first);
  if (!odds) return {0, __builtin_nanf(""), 0};
  int lane = 0;
  while (lane < W - 1 && first[lane] != top) lane++;
  first[lane] = second[lane];
  const float next = highest(first);
  if (next == none) return {top, top, __builtin_inff()};  // p = 1
  vf sums = {};
  for (int64_t j = 0; j < count; j += W) {
    const vf x = load_some(row + j, count - j, none) - next;
    sums += exp_nonpositive(select(x > vf{}, vf{}, x));  // 1 for the top
  }
  const float rest = next + __builtin_logf(sum(sums) - 1), ahead = top - rest;
  const float total = top + __builtin_log1pf(__builtin_expf(-ahead));
  return {total, ahead > 0 ? top : __builtin_nanf(""), ahead};
}

static int64_t first_of(const float *row, int64_t count, float value) {
  for (int64_t j = 0; j < count; j += W) {
    const uint32_t less = bits_greater(splat(value), load_some(row + j, count - j, -__builtin_inff()));
    const uint32_t found = ~less & (uint32_t)((1ull << W) - 1);
    if (found && j + __builtin_ctz(found) < count) return j + __builtin_ctz(found);
  }
  return 0;
}

static inline vf rank_of(vf x, const Ranking &by) { return select(x == splat(by.top), splat(by.odds), x - by.total); }

struct TopScratch {
  Candidates of[MOST_VECTORS];  // (W,room)
  float *sample;                // (sampled,W)
  int32_t *numbers;
  int32_t *found;  // (MOST_VECTORS·W)
  float *bound;    // (MOST_VECTORS·W)

  static int64_t sampled(int64_t tokens) {
    const int64_t share = tokens / SAMPLE_SHARE;
    return tokens < LEAST_SAMPLE ? tokens : share > LEAST_SAMPLE ? share : LEAST_SAMPLE;
  }

  TopScratch(Arena &arena, const Sizes &s) {
    const int64_t most = sampled(s.N), wide = 4 * s.K + 256, room = round_up(wide < s.N ? wide : s.N, W);
    for (Candidates &each : of) each = {arena.take<float>(W * room + W), arena.take<int32_t>(W * room + W), room};
    sample = arena.take<float>(most * W);
    numbers = arena.take<int32_t>(most * W > room ? most * W : room);
    found = arena.take<int32_t>(MOST_VECTORS * W);
    bound = arena.take<float>(MOST_VECTORS * W);
  }
};

// One head's scores, and which of its tokens count.
struct Scored {
  const float *scores;  // of token 0
  int64_t row;          // floats from one token to the next
  Positions tokens;
  const Ranking *by;    // (N)
  int64_t columns, wanted;
};

// For W columns a bound that more than the wanted values exceed, by a sample.
static vf sampled_bound(const Scored &of, int64_t column, const TopScratch &own) {
  const int64_t n = of.tokens.count, count = TopScratch::sampled(n);
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = of.tokens[i * n / count];
    const float *row = of.scores + token * of.row + column;
    store(own.sample + i * W, rank_of(load_some(row, of.columns - column, 0), of.by[token]));
  }
  if (count == n) return bound_of_columns(own.sample, W, count, of.wanted, own.numbers);
  const float mean = (float)of.wanted * (float)count / (float)n;  // four deviations more
  const int64_t k = (int64_t)(mean + 4 * __builtin_sqrtf(mean)) + 4;
  return bound_of_columns(own.sample, W, count, k < count ? k : count, own.numbers);
}

static void keep_wanted(const TopScratch &own, int64_t column, int64_t wanted) {
  const Candidates &all = own.of[column / W];
  const int64_t lane = column % W;
  own.found[column] = (int32_t)keep_largest(all.logits + lane * all.room, all.ranks + lane * all.room,
                                            own.found[column], wanted, own.numbers, own.bound + column);
}

// Tokens [from, to) by rank whose value passes the bounds of columns first + v·W … become candidates.
static void scan(const Scored &of, int64_t first, int64_t v, int64_t from, int64_t to, const TopScratch &own) {
  const Candidates &all = own.of[v];
  const int64_t column = first + v * W;
  for (int64_t rank = from; rank < to; rank++) {
    const int64_t token = of.tokens[rank];
    const vf value = rank_of(load_some(of.scores + token * of.row + column, of.columns - column, 0), of.by[token]);
    for (uint32_t hits = bits_greater(value, load(own.bound + v * W)); hits; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      const int64_t here = v * W + lane;
      if (own.found[here] == all.room) {
        keep_wanted(own, here, of.wanted);
        if (!(value[lane] > own.bound[here])) continue;
      }
      all.logits[lane * all.room + own.found[here]] = value[lane];
      all.ranks[lane * all.room + own.found[here]++] = (int32_t)rank;
    }
  }
}

// Columns [first, first + count) of one head; slots (count,K) hold `empty` beyond what was found.
static void top_of_columns(const Scored &of, int64_t first, int64_t count, int64_t K, int64_t empty,
                           const TopScratch &own, int64_t *slots) {
  const int64_t vectors = (count + W - 1) / W, n = of.tokens.count;
  auto bar = [&](int64_t column, float value) { own.bound[column] = column < count ? value : __builtin_inff(); };
  for (int64_t v = 0; v < vectors; v++) {
    const vf bound = of.wanted < n ? sampled_bound(of, first + v * W, own) : splat(-__builtin_inff());
    for (int64_t lane = 0; lane < W; lane++) bar(v * W + lane, bound[lane]);
  }
  for (int64_t i = 0; i < vectors * W; i++) own.found[i] = 0;
  for (int64_t from = 0; from < n; from += SCAN_TILE)
    for (int64_t v = 0; v < vectors; v++) scan(of, first, v, from, from + SCAN_TILE < n ? from + SCAN_TILE : n, own);
  for (int64_t v = 0; v < vectors; v++) {
    bool again = false;
    for (int64_t i = v * W; i < v * W + W; i++) {
      const bool few = i < count && own.found[i] < of.wanted;
      own.bound[i] = few ? -__builtin_inff() : __builtin_inff();
      if (few) own.found[i] = 0;
      again |= few;
    }
    if (again) scan(of, first, v, 0, n, own);
  }
  for (int64_t i = 0; i < count; i++, slots += K) {
    if (own.found[i] > of.wanted) keep_wanted(own, i, of.wanted);
    const int32_t *ranks = own.of[i / W].ranks + i % W * own.of[i / W].room;
    for (int64_t k = 0; k < K; k++) slots[k] = k < own.found[i] ? of.tokens[ranks[k]] : empty;
  }
}

static int64_t top_of(const Selecting &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  const Masks real(arena, a.real, s.B, s.N);
  Ranking *by = arena.take<Ranking>(s.B * s.H * s.N);
  const PerThread<TopScratch> scratch(arena, s);
  if (!arena.base) return arena.used;

  const int64_t heads = s.B * s.H, tiles = (s.N + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
  const Stage ranking = {heads * tiles, [&](int64_t task, int) {
    const int64_t bh = task / tiles, start = task % tiles * ROWS_OF_TASK;
    for (int64_t i = start; i < start + ROWS_OF_TASK && i < s.N; i++) {
      const float *row = row_of<float>(a.scores, bh / s.H, bh % s.H, i);
      float largest;
      by[bh * s.N + i] = rank_row(row, s.C, a.odds != 0, &largest);
      a.best[bh * s.N + i] = first_of(row, s.C, largest);
    }
  }};
  const int64_t vectors = (s.C + W - 1) / W, shared = heads * vectors / (4 * s.threads);
  const int64_t share = shared < 1 ? 1 : shared < MOST_VECTORS ? shared : MOST_VECTORS;
  const int64_t groups = (vectors + share - 1) / share;
  const Stage choice = {heads * groups, [&](int64_t task, int thread) {
    const int64_t bh = task / groups, b = bh / s.H, first = task % groups * share * W;
    const Positions tokens = real.of(b);
    const int64_t wanted = a.wanted[b] < tokens.count ? a.wanted[b] : tokens.count;
    const Scored of = {row_of<float>(a.scores, b, bh % s.H, 0), a.scores.token, tokens, by + bh * s.N, s.C,
                       wanted < s.K ? wanted : s.K};
    const int64_t count = first + share * W < s.C ? share * W : s.C - first;
    top_of_columns(of, first, count, s.K, s.N, scratch.of[thread], a.slots + (bh * s.C + first) * s.K);
  }};
  parallel_stages(s.threads, ranking, choice);
  return arena.used;
}

// Tokens sorted by label into blocks of K slots, each label starting a new block; a label of C is in none.
static int64_t blocks_of(const Blocking &a) {
  const Sizes &s = a.sizes;
  Arena arena{(char *)a.workspace};
  int64_t *next = arena.take<int64_t>(s.B * s.H * s.C);
  if (!arena.base) return arena.used;
  const int64_t T = (s.N + s.K - 1) / s.K + s.C;
  parallel_for(s.threads, s.B * s.H, [&](int64_t bh, int) {
    const int64_t *labels = a.labels + bh * s.N;
    int64_t *tokens = a.tokens + bh * T * s.K, *bucket = a.bucket + bh * T, *slot = next + bh * s.C, block = 0;
    for (int64_t c = 0; c < s.C; c++) slot[c] = 0;
    for (int64_t i = 0; i < s.N; i++)
      if (filled(labels[i], s.C)) slot[labels[i]]++;
    for (int64_t c = 0; c < s.C; c++) {
      const int64_t blocks = (slot[c] + s.K - 1) / s.K;
      slot[c] = block * s.K;
      for (const int64_t end = block + blocks; block < end; block++) bucket[block] = c;
    }
    a.used[bh] = block;
    for (int64_t t = block; t < T; t++) bucket[t] = s.C - 1;
    for (int64_t i = 0; i < T * s.K; i++) tokens[i] = s.N;
    for (int64_t i = 0; i < s.N; i++)
      if (filled(labels[i], s.C)) tokens[slot[labels[i]]++] = i;
  });
  return arena.used;
}
