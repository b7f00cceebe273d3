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

  void add_keys(int64_t count) const {
    for (int64_t i = 0; i < key_heads(); i++)
      gemm(a.D, E(), count, own.keys[i], 1, R(), own.values[i], E(), state, E(), true);
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
    add_keys(count);
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
  const PerThread<ProductScratch> scratch(arena, a.threads, a, a.G / per_item);
  if (!arena.base) return arena.used;

  // Ranges are numbered in the order of the sum.
  auto run = [&](int64_t task, int thread, int64_t state, bool attend) {
    const int64_t of = task / ranges.count, range = task % ranges.count;
    const int64_t from = (a.reverse ? ranges.count - 1 - range : range) * ranges.size;
    const int64_t to = from + ranges.size < a.N ? from + ranges.size : a.N;
    const ProductTask work{a, scratch.of[thread], states[state], of / per_item, of % per_item};
    work.tiles(from, to, [&](int64_t at, int64_t count) {
      if (attend) return work.tile(at, count);
      work.load_keys(at, count);
      work.add_keys(count);
    });
  };
  const Stage sums = {all * ranges.count, [&](int64_t task, int thread) {
    const bool last = (task + 1) % ranges.count == 0;
    const int64_t next = last ? task + 1 - ranges.count : task + 1;  // nobody needs the last range's
    zero(states[next], size);
    if (!last) run(task, thread, next, false);
  }};
  const Stage combined = {ranges.count > 1 ? all : 0, [&](int64_t of, int) {
    for (int64_t range = of * ranges.count + 1; range < (of + 1) * ranges.count; range++)
      for (int64_t i = 0; i < size; i++) states[range][i] += states[range - 1][i];
  }};
  const Stage products = {all * ranges.count, [&](int64_t task, int thread) { run(task, thread, task, true); }};
  parallel_stages(a.threads, sums, combined, products);
  return arena.used;
}
