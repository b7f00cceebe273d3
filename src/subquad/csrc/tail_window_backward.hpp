// The gradients of near keys. With lse_i of all that query i meets, δ_i = dO_i·out_i − dlse_i, and w, r as there:
//
//     p_ij = e^{ln w_ij − lse_i}    dw_ij = p_ij (dO_i·v_j − δ_i)     dQ_i += scale Σ_j dw_ij k_j,  dK_j += scale Σ_i dw_ij q_i
//     ρ_ij = e^{ln r_ij − lse_i}    dr_ij = −ρ_ij (dO_i·v_j − δ_i)    dq̄  += scale Σ_j dr_ij k_j,  dK_j += scale Σ_i dr_ij q̄
//     dV_j += Σ_i (p_ij − ρ_ij) dO_i                                  du_ix = Σ_{j in x} dr_ij
//
// The members take du from here: u_ix is their logit of cell x less what does not depend on the query. A task has all
// queries of a key head's heads, in their order.

// What near keys give one head's queries, in their order.
struct NearHeadGradients {
  float *queries, *means;  // (N,D') Σ_j dw k_j and Σ_j dr k_j, without the scale
  float *shifts;           // (N,X) du
  float *delta;            // (N) δ
  uint64_t *listed;        // as in NearHead

  NearHeadGradients(Arena &arena, const TailInputs &in) {
    const int64_t N = in.window > 0 ? in.N : 0, D = round_up(in.D, W);
    queries = arena.take<float>(N * D);
    means = arena.take<float>(N * D);
    shifts = arena.take<float>(N * in.cells);
    delta = arena.take<float>(N);
    listed = arena.take<uint64_t>(in.window > 0 ? in.clusters * words_of(in) : 0);
  }
};

// The keys and values of one key head, in place.
struct NearKeyGradients {
  float *keys, *values;  // (M,D'), (M,E')

  NearKeyGradients(Arena &arena, const TailInputs &in) {
    const int64_t M = in.window > 0 ? in.M : 0;
    keys = arena.take<float>(M * round_up(in.D, W));
    values = arena.take<float>(M * round_up(in.E, W));
  }
};

struct NearGradScratch {
  NearScratch tile;
  float *grads;     // (NEAR_QUERIES,E')
  float *products;  // (NEAR_QUERIES,lanes) dO·v, then p − ρ

  NearGradScratch(Arena &arena, const TailInputs &in) : tile(arena, in) {
    const int64_t queries = in.window > 0 ? NEAR_QUERIES : 0;
    grads = arena.take<float>(queries * round_up(in.E, W));
    products = arena.take<float>(queries * NearScratch::lanes_of(in));
  }
};

// δ of a head's queries; 0 for those in no cluster.
template <class T>
static void near_deltas(const TailBackward &a, int64_t bh, const NearHeadGradients &to) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, h = bh % in.H;
  for (int64_t i = 0; i < in.N; i++) {
    float delta = 0;
    if (in.labels[bh * in.N + i] < in.clusters) {
      if (a.grad_out.data) {
        const T *grad = row_of<T>(a.grad_out, b, h, i), *out = row_of<T>(a.out, b, h, i);
        for (int64_t e = 0; e < in.E; e++) delta += widen(grad[e]) * widen(out[e]);
      }
      if (a.grad_lse) delta -= a.grad_lse[bh * in.N + i];
    }
    to.delta[i] = delta;
  }
}

// The logits of w and r to their gradients, in their place, and products to p − ρ; adds to du.
static void near_slopes(const TailBackward &a, const int32_t *cell, int64_t bh, const NearTile &tile,
                        const NearHeadGradients &to, const NearGradScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t lanes = tile.lanes();
  for (int64_t i = 0; i < tile.count; i++) {
    const int64_t query = tile.first + i, at = bh * in.N + query;
    float *exact = own.tile.exact + i * lanes, *counted = own.tile.counted + i * lanes, *products = own.products + i * lanes;
    float *of_shifts = to.shifts + query * in.cells;
    zero(of_shifts, in.cells);
    if (in.labels[at] == in.clusters || a.lse[at] == -__builtin_inff()) {
      zero(exact, lanes);
      zero(counted, lanes);
      zero(products, lanes);
      continue;
    }
    const float lse = a.lse[at], residual = a.saved.residual[at], kept = a.saved.kept[at], delta = to.delta[query];
    for (int64_t v = 0; v < lanes; v += W) {
      const vf p = exp_nonpositive((load(exact + v) - lse) - residual);
      // May exceed 1, as weights of cells in `apart_softmax_gradient`: near keys took from the sum what cells counted too
      // much. While cells are kept, it is e^12 at most, for which `exp_nonpositive` holds too.
      const vf r = kept == 0 ? vf{} : exp_nonpositive((load(counted + v) - lse) - residual);
      const vf slope = load(products + v) - delta;
      store(exact + v, p * slope);
      store(counted + v, r * -slope);
      store(products + v, p - r);
    }
    for (int64_t j = 0; kept != 0 && j < tile.keys(); j++)
      if (cell[tile.from + j] < in.cells) of_shifts[cell[tile.from + j]] += counted[j];
  }
}

template <class T>
static void near_backward(const TailBackward &a, const NearKeys &keys, int64_t at, int64_t bg,
                          const NearHeadGradients *heads, const NearKeyGradients &to, const NearGradScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t group = in.H / in.G, b = bg / in.G, D = round_up(in.D, W), E = round_up(in.E, W);
  zero(to.keys, in.M * D);
  zero(to.values, in.M * E);
  for (int64_t i = 0; i < group; i++) {
    const NearHeadGradients &head = heads[i];
    const int64_t bh = b * in.H + bg % in.G * group + i;
    for (int64_t c = 0; c < in.clusters; c++) list_top(in, a.saved, bh, c, head.listed);
    near_deltas<T>(a, bh, head);
    for (int64_t first = 0; first < in.N; first += NEAR_QUERIES) {
      const int64_t count = in.N - first < NEAR_QUERIES ? in.N - first : NEAR_QUERIES;
      const NearTile tile = near_tile(in, b, first, count);
      const int64_t lanes = tile.lanes(), n = tile.keys();
      pack_near_queries<T>(in, a.saved, bh, tile, own.tile);
      near_logits(in, keys, at, bh, a.saved.shifts + bh * in.N * in.cells, head.listed, tile, own.tile);
      for (int64_t q = 0; q < count; q++) {
        if (!a.grad_out.data || in.labels[bh * in.N + first + q] == in.clusters) zero(own.grads + q * E, E);
        else load_row(row_of<T>(a.grad_out, b, bh % in.H, first + q), in.E, own.grads + q * E, E);
      }
      gemm(count, lanes, in.E, own.grads, E, 1, keys.values_across[at] + tile.from, keys.lanes, own.products, lanes, false);
      near_slopes(a, keys.cell[at], bh, tile, head, own);
      const float *rows = keys.rows[at] + tile.from * D;
      gemm(count, D, n, own.tile.exact, lanes, 1, rows, D, head.queries + first * D, D, false);
      gemm(count, D, n, own.tile.counted, lanes, 1, rows, D, head.means + first * D, D, false);
      gemm(n, D, count, own.tile.exact, 1, lanes, own.tile.queries, D, to.keys + tile.from * D, D, true);
      gemm(n, D, count, own.tile.counted, 1, lanes, own.tile.means, D, to.keys + tile.from * D, D, true);
      gemm(n, E, count, own.products, 1, lanes, own.grads, E, to.values + tile.from * E, E, true);
    }
  }
}
