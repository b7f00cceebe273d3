// out_t = Σ_{i≤t} (q_t·k_i) v_i, or over i ≥ t: a matrix of the sums so far, S = Σ k_i v_iᵀ, and a tile's own keys in
// pairs:
//
//     tiles so far  → S (R,E′)      out = q·S + tril(q·kᵀ)·v,  then  S += kᵀ·v
//
// H query heads and G key heads: one of the numbers divides the other. A query head with several key heads gets the sum
// of what it gets from each.

struct ProductScratch {
  float *queries;             // (TILE,R′)
  Pieces<float> keys;         // a key head: (TILE,R′)
  Pieces<float> key_columns;  // a key head: (R,TILE)
  Pieces<float> values;       // a key head: (TILE,E′)
  float *out;                 // (TILE,E′)
  float *pairs;               // (TILE,TILE)

  ProductScratch(Arena &arena, const CausalProduct &a, int64_t key_heads) {
    const int64_t R = round_up(a.D, W), E = round_up(a.E, W);
    queries = arena.take<float>(TILE * R);
    keys = arena.take_each<float>(key_heads, TILE * R);
    key_columns = arena.take_each<float>(key_heads, R * TILE);
    values = arena.take_each<float>(key_heads, TILE * E);
    out = arena.take<float>(TILE * E);
    pairs = arena.take<float>(TILE * TILE);
  }
};

// The heads of one state in one range of the sequence.
struct ProductTask {
  const CausalProduct &a;
  const ProductScratch &own;
  float *state;  // (R,E′)
  int64_t b, state_of;  // which of the states of item b

  int64_t states() const { return a.H < a.G ? a.H : a.G; }
  int64_t query_heads() const { return a.H / states(); }
  int64_t key_heads() const { return a.G / states(); }
  int64_t R() const { return round_up(a.D, W); }
  int64_t E() const { return round_up(a.E, W); }

  void load_keys(int64_t at, int64_t count) const {
    for (int64_t i = 0; i < key_heads(); i++) {
      const int64_t g = state_of * key_heads() + i;
      float *keys = own.keys[i];
      pack_rows<float>(a.key, b, g, nullptr, at, count, a.D, keys, R());
      zero(keys + count * R(), (round_up(count, W) - count) * R());
      pack_rows<float>(a.value, b, g, nullptr, at, count, a.E, own.values[i], E());
    }
  }

  // To rows [first, first + rows) of a state.
  void add_keys(int64_t count, int64_t first, int64_t rows, float *to) const {
    for (int64_t i = 0; i < key_heads(); i++)
      gemm(rows, E(), count, own.keys[i] + first, 1, R(), own.values[i], E(), to + first * E(), E(), true);
  }

  // To out, what the tile's own keys give.
  void attend_own(int64_t count, int64_t i) const {
    const int64_t lanes = round_up(count, W);
    gemm_deep(count, lanes, a.D, own.queries, R(), 1, own.key_columns[i], TILE, own.pairs, TILE, false);
    for (int64_t t = 0; t < count; t++)
      for (int64_t j = 0; j < lanes; j += W) {
        const vf pairs = load(own.pairs + t * TILE + j);
        store(own.pairs + t * TILE + j, a.reverse ? lanes_from(t - j, pairs) : lanes_before(t + 1 - j, pairs, 0));
      }
    gemm(count, E(), count, own.pairs, TILE, 1, own.values[i], E(), own.out, E(), true);
  }

  void tile(int64_t at, int64_t count) const {
    load_keys(at, count);
    for (int64_t i = 0; i < key_heads(); i++)
      pack_transposed(own.keys[i], round_up(count, W), a.D, R(), own.key_columns[i], TILE);
    for (int64_t h = state_of * query_heads(); h < (state_of + 1) * query_heads(); h++) {
      pack_rows<float>(a.query, b, h, nullptr, at, count, a.D, own.queries, R());
      gemm_deep(count, E(), a.D, own.queries, R(), 1, state, E(), own.out, E(), false);
      for (int64_t i = 0; i < key_heads(); i++) attend_own(count, i);
      for (int64_t t = 0; t < count; t++) store_row(own.out + t * E(), a.E, row_of<float>(a.out, b, h, at + t));
    }
    add_keys(count, 0, a.D, state);
  }

  // `each(at, count)` for the tiles of [from, to) in the order of the sum.
  template <class Each>
  void tiles(int64_t from, int64_t to, const Each &each) const {
    const int64_t tiles = (to - from + TILE - 1) / TILE;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t at = from + (a.reverse ? tiles - 1 - i : i) * TILE;
      each(at, to - at < TILE ? to - at : TILE);
    }
  }
};

static int64_t causal_product(const CausalProduct &a, void *workspace) {
  const int64_t per_item = a.H < a.G ? a.H : a.G, all = a.B * per_item, size = a.D * round_up(a.E, W);
  Arena arena{(char *)workspace};
  const Ranges ranges(all, a.N, TILE, a.threads);
  const Pieces<float> states = arena.take_each<float>(all * ranges.count, size);  // of what comes before each range
  const Slices slices(a.D, ranges.count > 1 ? a.threads : 1);
  const PerThread<ProductScratch> scratch(arena, a.threads, a, a.G / per_item);
  if (!arena.base) return arena.used;

  // Ranges are numbered in the order of the sum.
  auto work_of = [&](int64_t of, int64_t range, int thread) {
    const int64_t state = of * ranges.count + range;
    return ProductTask{a, scratch.of[thread], states[state], of / per_item, of % per_item};
  };
  auto tiles_of = [&](const ProductTask &work, int64_t range, auto &&each) {
    const int64_t from = (a.reverse ? ranges.count - 1 - range : range) * ranges.size;
    work.tiles(from, from + ranges.size < a.N ? from + ranges.size : a.N, each);
  };
  // Threads share the one scan that makes the ranges' states by rows, so that it has the same order for any number.
  const Stage sums = {all * slices.count, [&](int64_t task, int thread) {
    const int64_t of = task / slices.count, first = task % slices.count * slices.size, E = round_up(a.E, W);
    const int64_t rows = a.D - first < slices.size ? a.D - first : slices.size;
    zero(states[of * ranges.count] + first * E, rows * E);
    for (int64_t range = 0; range + 1 < ranges.count; range++) {
      const ProductTask work = work_of(of, range, thread);
      float *next = states[of * ranges.count + range + 1];
      for (int64_t i = first * E; i < (first + rows) * E; i++) next[i] = work.state[i];
      tiles_of(work, range, [&](int64_t at, int64_t count) {
        work.load_keys(at, count);
        work.add_keys(count, first, rows, next);
      });
    }
  }};
  const Stage products = {all * ranges.count, [&](int64_t task, int thread) {
    const ProductTask work = work_of(task / ranges.count, task % ranges.count, thread);
    tiles_of(work, task % ranges.count, [&](int64_t at, int64_t count) { work.tile(at, count); });
  }};
  parallel_stages(a.threads, sums, products);
  return arena.used;
}
