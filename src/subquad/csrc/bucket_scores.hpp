// Scores of tokens over buckets, a tile of tokens at a time, and how they rank the tokens of a bucket.
//
// Scores are given, or are sums of hash functions, which are computed here whenever they are needed: no N×C numbers lie
// in memory.

constexpr int64_t SCORE_TILE = 48;

struct ScoreScratch {
  int32_t *tokens;        // (SCORE_TILE)
  float *input, *output;  // (SCORE_TILE,widest') of a layer
  float *weights;         // of all layers, their rows padded to whole vectors
  float *biases;          // of the hidden layers
  float *bias;            // (C') of the last ones together; −∞ beyond C
  float *tile;            // (SCORE_TILE,C')

  ScoreScratch(Arena &arena, const Selecting &a) {
    const int64_t C = round_up(a.buckets, W);
    int64_t widest = 0, all = 0, hidden = 0;
    for (int64_t t = 0; t < a.terms.count; t++)
      for (int64_t l = 0; l < a.terms[t].layers.count; l++) {
        const HashLayer &layer = a.terms[t].layers[l];
        const int64_t in = round_up(layer.in, W), out = round_up(layer.out, W);
        const bool last = l + 1 == a.terms[t].layers.count;
        widest = in > widest ? in : widest;
        all += layer.in * out;
        hidden += last ? 0 : out;
      }
    tokens = arena.take<int32_t>(SCORE_TILE);
    input = arena.take<float>(SCORE_TILE * widest);
    output = arena.take<float>(SCORE_TILE * widest);
    weights = arena.take<float>(all);
    biases = arena.take<float>(hidden);
    bias = arena.take<float>(C);
    tile = arena.take<float>(SCORE_TILE * C);
  }
};

// The weights of one head's hash functions.
static void pack_hashes(const Selecting &a, int64_t h, const ScoreScratch &own) {
  const int64_t C = round_up(a.buckets, W);
  float *weights = own.weights, *biases = own.biases;
  for (int64_t c = 0; c < C; c++) own.bias[c] = c < a.buckets ? 0 : -__builtin_inff();
  for (int64_t t = 0; t < a.terms.count; t++) {
    const HashTerm &term = a.terms[t];
    const int64_t g = h / (a.H / term.heads);
    for (int64_t l = 0; l < term.layers.count; l++) {
      const HashLayer &layer = term.layers[l];
      const int64_t out = round_up(layer.out, W);
      for (int64_t r = 0; r < layer.in; r++, weights += out)
        load_row(layer.weight + (g * layer.in + r) * layer.out, layer.out, weights, out);
      const float *bias = layer.bias + g * layer.out;
      if (l + 1 == term.layers.count) {
        for (int64_t c = 0; c < layer.out; c++) own.bias[c] += bias[c];
      } else {
        load_row(bias, layer.out, biases, out);
        biases += out;
      }
    }
  }
}

// Adds one hash function's scores to the tile. The weights and biases are passed by.
static void add_hashes(const Selecting &a, const HashTerm &term, int64_t b, int64_t h, int64_t count,
                       const ScoreScratch &own, const float *&weights, const float *&biases) {
  float *input = own.input, *output = own.output;
  int64_t row = round_up(term.layers[0].in, W);
  pack_rows<float>(term.x, b, h / (a.H / term.heads), own.tokens, 0, count, term.layers[0].in, input, row);
  for (int64_t i = 0; i < count * row; i++) input[i] *= a.root;
  for (int64_t l = 0; l < term.layers.count; l++) {
    const HashLayer &layer = term.layers[l];
    const int64_t out = round_up(layer.out, W);
    const bool last = l + 1 == term.layers.count;
    gemm(count, out, layer.in, input, row, 1, weights, out, last ? own.tile : output, out, last);
    weights += layer.in * out;
    if (last) return;
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < out; j += W)
        store(output + i * out + j, maximum(vf{}, load(output + i * out + j) + load(biases + j)));  // NaN stays
    biases += out;
    float *const done = output;
    output = input, input = done, row = out;
  }
}

// The scores of `count` of the tokens that `own` names.
static void score_tile(const Selecting &a, int64_t b, int64_t h, int64_t count, const ScoreScratch &own) {
  const int64_t C = round_up(a.buckets, W);
  for (int64_t i = 0; i < count; i++) {
    float *to = own.tile + i * C;
    for (int64_t c = 0; c < C; c += W) store(to + c, load(own.bias + c));
    if (a.terms.count == 0) load_row(row_of<float>(a.scores, b, h, own.tokens[i]), a.buckets, to, a.buckets);
  }
  const float *weights = own.weights, *biases = own.biases;
  for (int64_t t = 0; t < a.terms.count; t++) add_hashes(a, a.terms[t], b, h, count, own, weights, biases);
}

// How a token's scores x are ranked: by x − total, but the one that equals `top` by `odds`. With the logits' softmax p
// that is ln p up to ½, and above it ln(p/(1 − p)), of which a token has one at most: the order of ln(p/(1 − p)), and
// exact where p rounds to 1.
struct Ranking {
  float total, top, odds;
};

// The ranking of a row of whole vectors, its largest score, and whether all scores are below infinity and numbers.
static Ranking rank_row(const float *row, int64_t columns, bool odds, float *largest, bool *usual) {
  const float none = -__builtin_inff();
  vf first = splat(none), second = first;  // in each lane
  vi numbers = vi{} - 1;
  for (int64_t j = 0; j < columns; j += W) {
    const vf x = load(row + j);
    second = maximum(select(x > first, first, x), second);
    first = maximum(x, first);
    numbers &= x <= splat(__FLT_MAX__);
  }
  const float top = *largest = highest(first);
  *usual = all_set(numbers);
  if (!odds || !*usual) return {0, __builtin_nanf(""), 0};
  int lane = 0;
  while (lane < W - 1 && first[lane] != top) lane++;
  first[lane] = second[lane];
  const float next = highest(first);
  if (next == none) return {top, top, top == none ? __builtin_inff() : __FLT_MAX__};  // p = 1, or without p
  vf sums = {};
  for (int64_t j = 0; j < columns; j += W) {
    const vf x = load(row + j) - next;
    sums += exp_nonpositive(select(x > vf{}, vf{}, x));  // 1 for the top
  }
  const float rest = next + __builtin_logf(sum(sums) - 1), ahead = top - rest;
  const float total = top + __builtin_log1pf(__builtin_expf(-ahead));
  return {total, ahead > 0 ? top : __builtin_nanf(""), ahead};
}

// A row with NaN or +∞ among its scores, ranked in place as the formula has it: NaN is above all, as torch sorts, and
// stands here as +∞, so +∞ stands as the largest number. Returns the column of the best score.
static int64_t rank_unusual(float *row, int64_t columns, bool odds) {
  const float inf = __builtin_inff();
  int64_t nans = 0, infinities = 0, best = 0;
  for (int64_t c = 0; c < columns; c++) {
    nans += row[c] != row[c];
    infinities += row[c] == inf;
    if (row[best] == row[best] && (row[c] != row[c] || row[c] > row[best])) best = c;
  }
  for (int64_t c = 0; c < columns; c++) {
    const bool nan = row[c] != row[c], top = row[c] == inf;
    if (!odds)
      row[c] = nan ? inf : top ? __FLT_MAX__ : row[c];
    else if (nans > 0 || (top && infinities > 1))  // the sum of e^score is NaN, or the rest of it is as large as the score
      row[c] = inf;
    else
      row[c] = top ? __FLT_MAX__ : -inf;
  }
  return best;
}

static inline vf rank_of(vf x, const Ranking &by) { return select(x == splat(by.top), splat(by.odds), x - by.total); }

// The first column with the largest score, of a row of numbers.
static int64_t first_of(const float *row, int64_t columns, float largest) {
  for (int64_t j = 0; j < columns; j += W) {
    const uint32_t found = ~bits_greater(splat(largest), load(row + j)) & (uint32_t)((1ull << W) - 1);
    if (found) return j + __builtin_ctz(found);
  }
  return 0;
}
