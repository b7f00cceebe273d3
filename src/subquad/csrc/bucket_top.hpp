// Balanced selection: of each column of scores the tokens that are largest in it, ties going to the lower token. NaN is
// larger than all numbers, as torch sorts it: a token whose scores are NaN is taken first, and what it meets is NaN.
//
// Tokens stream by once, all columns of one after the other. A bound from a sample of the tokens lets few values of a
// column through; those become candidates, of which the best are kept whenever their room is full. What is chosen does
// not depend on the sample or on how tokens are shared out: columns that a sample misled are gone through again.
//
//                  columns: buckets →
//     sampling     every n-th token                →  bound of each column
//     streaming    tokens ↓  value > bound?        →  candidates of each column, per chunk of tokens
//                                                     [ best so far | room ]   full: the best stay, the worst of them
//                                                                              is the new bound
//     merging      candidates of all chunks        →  the best of each column; too few: again without a bound

constexpr int64_t LEAST_SAMPLE = 1024, SAMPLE_SHARE = 16;

static int64_t sampled(int64_t tokens) {
  return tokens / SAMPLE_SHARE > LEAST_SAMPLE ? tokens / SAMPLE_SHARE : LEAST_SAMPLE;
}

struct Candidates {
  float *logits;
  int32_t *ranks;
  int64_t room;
};

// The best of each column in the chunks of the heads' tokens, ascending: a chunk's in a piece of its own.
struct ChunkTops {
  Pieces<float> values;   // (C,K)
  Pieces<int32_t> ranks;  // (C,K)
  Pieces<int32_t> found;  // (C)
  Pieces<float> bounds;   // a head: (C')
  int64_t chunks;

  ChunkTops(Arena &arena, const Selecting &in) {
    const int64_t heads = in.B * in.H;
    chunks = heads_side_by_side(heads, in.threads) ? 1 : 2 * in.threads;
    values = arena.take_each<float>(heads * chunks, in.buckets * in.slots);
    ranks = arena.take_each<int32_t>(heads * chunks, in.buckets * in.slots);
    found = arena.take_each<int32_t>(heads * chunks, in.buckets);
    bounds = arena.take_each<float>(heads, round_up(in.buckets, W));
  }
};

struct TopScratch {
  ScoreScratch scores;
  Ranking *by;      // (SCORE_TILE)
  float *sample;    // (sampled,C')
  Candidates best;  // (C,room)
  int32_t *numbers, *found;
  float *bound;  // (C')

  TopScratch(Arena &arena, const Selecting &in, const ChunkTops &chunks_of) : scores(arena, in) {
    const int64_t C = round_up(in.buckets, W), few = 4 * in.slots + 256, all = chunks_of.chunks * in.slots;
    const int64_t room = round_up(few < in.N ? few : in.N, W), most = in.N > LEAST_SAMPLE ? sampled(in.N) : 0;
    const int64_t merged = round_up(all > room ? all : room, W);
    by = arena.take<Ranking>(SCORE_TILE);
    sample = arena.take<float>(most * C);
    best = {arena.take<float>(in.buckets * room + merged), arena.take<int32_t>(in.buckets * room + merged), room};
    numbers = arena.take<int32_t>(most * W > merged ? most * W : merged);
    found = arena.take<int32_t>(C);
    bound = arena.take<float>(C);
  }
};

// One head.
struct TopOf {
  const Selecting &a;
  int64_t b, h;
  Positions tokens;
  int64_t wanted;  // of each column

  TopOf(const Selecting &a, int64_t bh, const Masks &valid) : a(a), b(bh / a.H), h(bh % a.H) {
    tokens = valid.of(b);
    const int64_t most = tokens.count < a.slots ? tokens.count : a.slots;
    wanted = a.wanted[b] < 0 ? 0 : a.wanted[b] < most ? a.wanted[b] : most;
  }

  int64_t row() const { return b * a.H + h; }

  // Scores and rankings of `count` tokens; at(i) is the rank of each.
  template <class At>
  void score(const TopScratch &own, int64_t count, At &&at, bool best) const {
    const int64_t columns = round_up(a.buckets, W);
    for (int64_t i = 0; i < count; i++) own.scores.tokens[i] = (int32_t)tokens[at(i)];
    score_tile(a, b, h, count, own.scores);
    for (int64_t i = 0; i < count; i++) {
      const int64_t found = rank(own.scores.tile + i * columns, own.by + i);
      if (best) a.best[row() * a.N + own.scores.tokens[i]] = found;
    }
  }

  // How a row is ranked, which may change it; returns the column of its best score.
  int64_t rank(float *scores, Ranking *by) const {
    const int64_t C = a.buckets, columns = round_up(C, W);
    float largest;
    bool usual;
    *by = rank_row(scores, columns, a.odds != 0, &largest, &usual);
    if (!usual) {  // perhaps only behind the columns, where 0·∞ leaves NaN
      for (int64_t c = C; c < columns; c++) scores[c] = -__builtin_inff();
      *by = rank_row(scores, columns, a.odds != 0, &largest, &usual);
    }
    return usual ? first_of(scores, columns, largest) : rank_unusual(scores, C, a.odds != 0);
  }
};

// For each column a bound that few values exceed, but more than are wanted if the sample is like the rest.
static void sample_bounds(const TopOf &of, const TopScratch &own, float *bounds) {
  const int64_t n = of.tokens.count, C = of.a.buckets, columns = round_up(C, W), count = sampled(n);
  for (int64_t c = 0; c < columns; c++) bounds[c] = c < C ? -__builtin_inff() : __builtin_inff();
  if (n <= LEAST_SAMPLE || of.wanted == n) return;
  pack_hashes(of.a, of.h, own.scores);
  for (int64_t first = 0; first < count; first += SCORE_TILE) {
    const int64_t size = count - first < SCORE_TILE ? count - first : SCORE_TILE;
    of.score(own, size, [&](int64_t i) { return (first + i) * n / count; }, false);
    for (int64_t i = 0; i < size; i++)
      for (int64_t c = 0; c < columns; c += W)
        store(own.sample + (first + i) * columns + c, rank_of(load(own.scores.tile + i * columns + c), own.by[i]));
  }
  // The expected number of the sample among the wanted. With four deviations (√mean each) more, the bound lets enough
  // tokens through but for rare bad luck.
  const float mean = (float)of.wanted * (float)count / (float)n;
  const int64_t k = (int64_t)(mean + 4 * __builtin_sqrtf(mean)) + 4;
  for (int64_t c = 0; c < columns; c += W) {
    const vf bound = bound_of_columns(own.sample + c, columns, count, k < count ? k : count, own.numbers);
    for (int64_t lane = 0; lane < W && c + lane < C; lane++) bounds[c + lane] = bound[lane];
  }
}

static void keep_wanted(const TopScratch &own, int64_t column, int64_t wanted) {
  const Candidates &all = own.best;
  own.found[column] = (int32_t)keep_largest(all.logits + column * all.room, all.ranks + column * all.room,
                                            own.found[column], wanted, own.numbers, own.bound + column);
}

// Values of a tile that pass their column's bound become candidates; its tokens have the ranks first, first + 1, …
static void take_passing(const TopOf &of, const TopScratch &own, int64_t first, int64_t count) {
  const int64_t columns = round_up(of.a.buckets, W), room = own.best.room;
  for (int64_t i = 0; i < count; i++)
    for (int64_t c = 0; c < columns; c += W) {
      const vf value = rank_of(load(own.scores.tile + i * columns + c), own.by[i]);
      for (uint32_t hits = bits_greater(value, load(own.bound + c)); hits; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        const int64_t column = c + lane;
        if (own.found[column] == room) {
          keep_wanted(own, column, of.wanted);
          if (!(value[lane] > own.bound[column])) continue;  // the bound has risen; of equal values the lower token stays
        }
        own.best.logits[column * room + own.found[column]] = value[lane];
        own.best.ranks[column * room + own.found[column]++] = (int32_t)(first + i);
      }
    }
}

// The tokens with ranks [from, to) against the bounds that `own` holds; at most the wanted ones stay of each column.
static void stream(const TopOf &of, const TopScratch &own, int64_t from, int64_t to, bool best) {
  pack_hashes(of.a, of.h, own.scores);
  for (int64_t c = 0; c < of.a.buckets; c++) own.found[c] = 0;
  for (int64_t first = from; first < to; first += SCORE_TILE) {
    const int64_t count = to - first < SCORE_TILE ? to - first : SCORE_TILE;
    of.score(own, count, [&](int64_t i) { return first + i; }, best);
    take_passing(of, own, first, count);
  }
  for (int64_t c = 0; c < of.a.buckets; c++)
    if (own.found[c] > of.wanted) keep_wanted(own, c, of.wanted);
}

static void top_of_chunk(const TopOf &of, const TopScratch &own, const ChunkTops &chunks_of, int64_t chunk) {
  const Selecting &in = of.a;
  const int64_t columns = round_up(in.buckets, W), share = (of.tokens.count + chunks_of.chunks - 1) / chunks_of.chunks;
  const int64_t from = chunk * share, to = from + share < of.tokens.count ? from + share : of.tokens.count;
  for (int64_t c = 0; c < columns; c++) own.bound[c] = chunks_of.bounds[of.row()][c];
  stream(of, own, from, to, true);
  for (int64_t c = 0; c < in.buckets; c++) {
    const int64_t at = of.row() * chunks_of.chunks + chunk;
    chunks_of.found[at][c] = own.found[c];
    for (int64_t i = 0; i < own.found[c]; i++) {
      chunks_of.values[at][c * in.slots + i] = own.best.logits[c * own.best.room + i];
      chunks_of.ranks[at][c * in.slots + i] = own.best.ranks[c * own.best.room + i];
    }
  }
}

static void write_slots(const TopOf &of, int64_t column, const int32_t *ranks, int64_t found) {
  const Selecting &in = of.a;
  int64_t *slots = in.tokens + (of.row() * in.buckets + column) * in.slots;
  for (int64_t k = 0; k < in.slots; k++) slots[k] = k < found ? of.tokens[ranks[k]] : in.N;
}

// One head's chunks together. Columns that have too few then are done again without a bound.
static void merge_top(const TopOf &of, const TopScratch &own, const ChunkTops &chunks_of) {
  const Selecting &in = of.a;
  const int64_t columns = round_up(in.buckets, W);
  const float *bounds = chunks_of.bounds[of.row()];
  bool again = false;
  for (int64_t c = 0; c < columns; c++) {
    own.bound[c] = __builtin_inff();
    if (c >= in.buckets) continue;
    int64_t found = 0;
    for (int64_t chunk = 0; chunk < chunks_of.chunks; chunk++) {
      const int64_t at = of.row() * chunks_of.chunks + chunk;
      for (int64_t i = 0; i < chunks_of.found[at][c]; i++, found++) {
        own.best.logits[found] = chunks_of.values[at][c * in.slots + i];
        own.best.ranks[found] = chunks_of.ranks[at][c * in.slots + i];
      }
    }
    float kth;
    if (found > of.wanted)
      found = keep_largest(own.best.logits, own.best.ranks, found, of.wanted, own.numbers, &kth);
    write_slots(of, c, own.best.ranks, found);
    if (found < of.wanted && bounds[c] != -__builtin_inff()) {
      own.bound[c] = -__builtin_inff();
      again = true;
    }
  }
  if (!again) return;
  // `stream` moves the bounds, so which columns are done again is kept in the first chunk's counts, which nobody needs now.
  int32_t *const again_of = chunks_of.found[of.row() * chunks_of.chunks];
  for (int64_t c = 0; c < in.buckets; c++) again_of[c] = own.bound[c] < 0;
  stream(of, own, 0, of.tokens.count, false);
  for (int64_t c = 0; c < in.buckets; c++)
    if (again_of[c])
      write_slots(of, c, own.best.ranks + c * own.best.room, own.found[c]);
}

static int64_t bucket_top(const Selecting &a, void *workspace) {
  Arena arena{(char *)workspace};
  const Masks valid(arena, a.valid, a.B, a.N);
  const ChunkTops chunks_of(arena, a);
  const PerThread<TopScratch> scratch(arena, a.threads, a, chunks_of);
  if (!arena.base) return arena.used;

  const int64_t heads = a.B * a.H;
  const Stage sampling = {heads, [&](int64_t bh, int thread) {
    for (int64_t i = 0; a.valid && i < a.N; i++) a.best[bh * a.N + i] = 0;  // padding's
    sample_bounds(TopOf(a, bh, valid), scratch.of[thread], chunks_of.bounds[bh]);
  }};
  const Stage streaming = {heads * chunks_of.chunks, [&](int64_t task, int thread) {
    top_of_chunk(TopOf(a, task / chunks_of.chunks, valid), scratch.of[thread], chunks_of, task % chunks_of.chunks);
  }};
  const Stage merging = {heads, [&](int64_t bh, int thread) {
    merge_top(TopOf(a, bh, valid), scratch.of[thread], chunks_of);
  }};
  parallel_stages(a.threads, sampling, streaming, merging);
  return arena.used;
}
