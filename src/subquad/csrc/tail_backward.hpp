// The whole backward pass of attention to exact keys and a tail, from the clusters, top keys and cells that the forward
// pass saved. With L all that a cluster's members meet (top keys, then cells), w a member's weights, and p a mean's
// weights on the keys of a cell:
//
//     out_i = Σ_L w_il V_l                         ds_il = w_il (dO_i·V_l − δ_i + dlse_i),  δ_i = Σ_L w_il dO_i·V_l
//     members   dQ_i  = scale Σ_L ds_il K_l        dK_l = scale Σ_i ds_il Q_i,  dV_l = Σ_i w_il dO_i
//     cell      its bias is lse_x − scale·q̄·k̄_x, with db = Σ_i ds_ix:
//               dlse_x = db,  dk̄ = scale Σ_i ds_ix (Q_i − q̄),  dv̄ as above,  dq̄ −= scale db k̄_x
//     keys      dp_j = dk̄·K_j + dv̄·V_j            dS_j = p_j (dp_j − dk̄·k̄ − dv̄·v̄ + dlse_x)
//               dK_j += p_j dk̄ + scale dS_j q̄,  dV_j += p_j dv̄,  dq̄ += scale Σ_j dS_j K_j
//
// and each member has its share of dq̄. Keys go cell by cell, in tiles; groups of heads go one after the other.

struct TailHeadGradients {
  float *keys, *values;              // (C,K,D'), (C,K,E'): of the top keys, from the members
  float *cell_keys, *cell_values;    // (X,C',D'), (X,C',E'): dk̄, dv̄
  float *shift, *of_lse;             // (X,C'): dk̄·k̄ + dv̄·v̄; dlse
  float *lse, *residual;             // (X,C'): ln Σ, +∞ where nothing is met; what rounding took from it
  float *queries;                    // (N,D') in the order of the clusters: from the members
  float *means;                      // (C,D') −db k̄, summed over the cells
  float *of_cells;                   // (X,C,D') Σ_j dS_j K_j
  float *centroids, *centroids_across;  // (C',D') times the scale, and transposed (D',C') as they are

  TailHeadGradients(Arena &arena, const TailInputs &in) {
    const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W), X = in.cells;
    keys = arena.take<float>(in.clusters * in.topk * D);
    values = arena.take<float>(in.clusters * in.topk * E);
    cell_keys = arena.take<float>(X * C * D);
    cell_values = arena.take<float>(X * C * E);
    shift = arena.take<float>(X * C);
    of_lse = arena.take<float>(X * C);
    lse = arena.take<float>(X * C);
    residual = arena.take<float>(X * C);
    queries = arena.take<float>(in.N * D);
    means = arena.take<float>(in.clusters * D);
    of_cells = arena.take<float>(X * in.clusters * D);
    centroids = arena.take<float>(C * D);
    centroids_across = arena.take<float>(D * C);
  }
};

struct TailGradScratch {
  MetScratch met;
  float *values;                // (E',L') the values transposed
  float *queries, *grads;       // (MEMBER_TILE,D'), (MEMBER_TILE,E')
  float *weights, *products;    // (MEMBER_TILE,L')
  float *lse, *norms, *bias;    // (MEMBER_TILE), (MEMBER_TILE), (L') db
  float *of_shifts;             // (X) with a window the sums of du
  float *of_keys, *of_values;   // (L',D'), (L',E')
  float *grad_keys, *grad_values;    // a tile of keys: (KEY_TILE,D'), (KEY_TILE,E')
  float *weights_t, *products_t;     // (KEY_TILE,C')
  float *cell_keys_t, *cell_values_t;  // (D',C'), (E',C') of one cell
  int64_t *cursor;              // (heads of a group,C) how far each list of top keys has been walked

  TailGradScratch(Arena &arena, const TailInputs &in) : met(arena, in) {
    const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
    const int64_t L = MetScratch::lanes_of(in);
    values = arena.take<float>(E * L);
    queries = arena.take<float>(MEMBER_TILE * D);
    grads = arena.take<float>(MEMBER_TILE * E);
    weights = arena.take<float>(MEMBER_TILE * L);
    products = arena.take<float>(MEMBER_TILE * L);
    lse = arena.take<float>(MEMBER_TILE);
    norms = arena.take<float>(MEMBER_TILE);
    bias = arena.take<float>(L);
    of_shifts = arena.take<float>(in.cells);
    of_keys = arena.take<float>(L * D);
    of_values = arena.take<float>(L * E);
    grad_keys = arena.take<float>(KEY_TILE * D);
    grad_values = arena.take<float>(KEY_TILE * E);
    weights_t = arena.take<float>(KEY_TILE * C);
    products_t = arena.take<float>(KEY_TILE * C);
    cell_keys_t = arena.take<float>(D * C);
    cell_values_t = arena.take<float>(E * C);
    cursor = arena.take<int64_t>(in.H / in.G * in.clusters);
  }
};

// A tile's products with keys and with values to its weights and ds = w (dO·V − δ + dlse), in their places; `bias` gains
// the sums of ds over the members.
static void tail_softmax_gradient(int64_t count, int64_t lanes, float scale, const TailGradScratch &own) {
  float highest[MEMBER_TILE];  // their log-sum-exps, which nobody reads
  exp_rows(own.weights, count, lanes, scale, own.met.bias, highest, own.norms);
  for (int64_t i = 0; i < count; i++) {
    float *w = own.weights + i * lanes, *p = own.products + i * lanes;
    scale_row(w, lanes, own.norms[i]);
    vf weighted = {};
    for (int64_t j = 0; j < lanes; j += W) weighted += load(w + j) * load(p + j);
    const float shift = sum(weighted) - own.lse[i];
    for (int64_t j = 0; j < lanes; j += W) {
      const vf ds = load(w + j) * (load(p + j) - shift);
      store(p + j, ds);
      store(own.bias + j, load(own.bias + j) + ds);
    }
  }
}

// The same where near keys have a part in lse and δ. The cells' products gain du too, whose sums over
// the members go to `of_shifts`.
static void apart_softmax_gradient(const TailBackward &a, const NearHeadGradients &near, int64_t bh, const int32_t *order,
                                   int64_t count, int64_t K, int64_t lanes, const TailGradScratch &own) {
  const TailInputs &in = a.inputs;
  for (int64_t i = 0; i < count; i++) {
    const int64_t query = order[i], at = bh * in.N + query;
    float *w = own.weights + i * lanes, *p = own.products + i * lanes;
    const float *shift = near.shifts + query * in.cells;
    const float lse = a.lse[at] == -__builtin_inff() ? __builtin_inff() : a.lse[at], residual = a.saved.residual[at];
    for (int64_t j = 0; j < lanes; j += W) {
      const vf logits = load(w + j) * in.scale + load(own.met.bias + j);
      store(w + j, exp_nonpositive((logits - lse) - residual));
    }
    for (int64_t x = 0; a.saved.kept[at] == 0 && x < in.cells; x++) w[K + x] = 0;
    for (int64_t j = 0; j < lanes; j += W) {
      const vf ds = load(w + j) * (load(p + j) - near.delta[query]);
      store(p + j, ds);
      store(own.bias + j, load(own.bias + j) + ds);
    }
    for (int64_t x = 0; x < in.cells; x++) {
      p[K + x] += shift[x];
      own.of_shifts[x] += shift[x];
    }
  }
}

// A tile of members, whose queries and gradients are packed: adds to the gradients of what they meet, and gives their own,
// which are still to be multiplied by the scale. `to_slopes` makes weights and ds of the products.
template <class ToSlopes>
static void met_tile_backward(int64_t count, int64_t L, int64_t width, int64_t value_width, const TailGradScratch &own,
                              float *to, ToSlopes &&to_slopes) {
  const int64_t lanes = round_up(L, W), D = round_up(width, W), E = round_up(value_width, W);
  gemm(count, lanes, width, own.queries, D, 1, own.met.keys, lanes, own.weights, lanes, false);
  gemm(count, lanes, value_width, own.grads, E, 1, own.values, lanes, own.products, lanes, false);
  to_slopes(lanes);
  gemm_with(count, D, L, own.products, lanes, 1, ListedRows{own.met.key_rows}, Product{to, D, false});
  gemm(L, D, count, own.products, 1, lanes, own.queries, D, own.of_keys, D, true);
  gemm(L, E, count, own.weights, 1, lanes, own.grads, E, own.of_values, E, true);
}

// What the members of cluster c give.
template <class T>
static void tail_members_backward(const TailBackward &a, const SortedKeys<float> &sorted, int64_t at, int64_t bh, int64_t c,
                                  const NearHeadGradients &near, const TailHeadGradients &to,
                                  const TailGradScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t b = bh / in.H, h = bh % in.H, bg = b * in.G + h / (in.H / in.G), row = bh * in.clusters + c;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W), X = in.cells;
  const int32_t *bounds = a.saved.offsets + bh * (in.clusters + 1) + c, *order = a.saved.order + bh * in.N;
  const bool no_keys = a.saved.cell_offsets[bg * (X + 1) + X] == 0;
  float *means = to.means + c * D;
  zero(means, D);
  zero(to.keys + c * in.topk * D, in.topk * D);
  zero(to.values + c * in.topk * E, in.topk * E);
  for (int64_t x = 0; x < X; x++) {
    zero(to.cell_keys + (x * C + c) * D, D);
    zero(to.cell_values + (x * C + c) * E, E);
    to.shift[x * C + c] = to.of_lse[x * C + c] = to.residual[x * C + c] = 0;
    to.lse[x * C + c] = __builtin_inff();
  }
  if (bounds[0] == bounds[1]) return;
  if (no_keys) return zero(to.queries + bounds[0] * D, (bounds[1] - bounds[0]) * D);
  const int64_t K = pack_met(in, a.saved, CellRows::saved(a.saved), sorted.keys[at], sorted.values[at], row, own.met);
  const int64_t L = K + X, lanes = round_up(L, W);
  pack_across(lanes, in.E, own.values, lanes, [&](int64_t i) { return own.met.value_rows[i]; });
  zero(own.bias, lanes);
  zero(own.of_shifts, X);
  zero(own.of_keys, L * D);
  zero(own.of_values, L * E);
  for (int64_t first = bounds[0]; first < bounds[1]; first += MEMBER_TILE) {
    const int64_t count = bounds[1] - first < MEMBER_TILE ? bounds[1] - first : MEMBER_TILE;
    pack_rows<T>(in.query, b, h, order, first, count, in.D, own.queries, D);
    if (a.grad_out.data) pack_rows<T>(a.grad_out, b, h, order, first, count, in.E, own.grads, E);
    else zero(own.grads, count * E);
    for (int64_t i = 0; i < count; i++) own.lse[i] = a.grad_lse ? a.grad_lse[bh * in.N + order[first + i]] : 0;
    met_tile_backward(count, L, in.D, in.E, own, to.queries + first * D, [&](int64_t lanes) {
      if (in.window == 0) tail_softmax_gradient(count, lanes, in.scale, own);
      else apart_softmax_gradient(a, near, bh, order + first, count, K, lanes, own);
    });
  }
  for (int64_t k = 0; k < K; k++)
    for (int64_t d = 0; d < D; d++) to.keys[(c * in.topk + k) * D + d] = own.of_keys[k * D + d] * in.scale;
  for (int64_t k = 0; k < K; k++) load_row(own.of_values + k * E, E, to.values + (c * in.topk + k) * E, E);
  for (int64_t x = 0; x < X; x++) {
    const float lse = a.saved.cell_lse[row * X + x], db = own.bias[K + x], moved = db + own.of_shifts[x];
    if (lse == -__builtin_inff()) continue;
    const float *key = own.met.key_rows[K + x];
    const float *mean = a.saved.centroids + row * in.D, *of_key = own.of_keys + (K + x) * D;
    const float *of_value = own.of_values + (K + x) * E;
    float *dk = to.cell_keys + (x * C + c) * D, *dv = to.cell_values + (x * C + c) * E;
    for (int64_t d = 0; d < in.D; d++) {
      dk[d] = (of_key[d] - moved * mean[d]) * in.scale;
      means[d] -= moved * key[d];
    }
    for (int64_t e = 0; e < in.E; e++) dv[e] = of_value[e];
    to.of_lse[x * C + c] = db;
    to.lse[x * C + c] = lse;
    to.residual[x * C + c] = a.saved.cell_residual[row * X + x];
  }
}

// What others who read the cells of cluster c give.
static void add_given_gradients(const TailBackward &a, int64_t bh, int64_t c, const TailHeadGradients &to) {
  const TailInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W), X = in.cells;
  for (int64_t x = 0; x < X; x++) {
    const int64_t at = (bh * in.clusters + c) * X + x;
    if (a.saved.cell_lse[at] == -__builtin_inff()) continue;
    float *dk = to.cell_keys + (x * C + c) * D, *dv = to.cell_values + (x * C + c) * E;
    for (int64_t d = 0; a.grad_cell_keys && d < in.D; d++) dk[d] += a.grad_cell_keys[at * in.D + d];
    for (int64_t e = 0; a.grad_cell_values && e < in.E; e++) dv[e] += a.grad_cell_values[at * in.E + e];
    if (a.grad_cell_lse) to.of_lse[x * C + c] += a.grad_cell_lse[at];
    to.lse[x * C + c] = a.saved.cell_lse[at];
    to.residual[x * C + c] = a.saved.cell_residual[at];
  }
}

// dk̄·k̄ + dv̄·v̄ of the cells of cluster c, added up as the products with the keys are: of a cell in which one key has
// all the weight, so that k̄ and v̄ are its own, that key's product less this is exactly 0.
static void shift_cells(const TailBackward &a, int64_t bh, int64_t c, const TailHeadGradients &to) {
  const TailInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W), X = in.cells;
  for (int64_t x = 0; x < X; x++) {
    const int64_t at = (bh * in.clusters + c) * X + x;
    if (to.lse[x * C + c] == __builtin_inff()) continue;
    const float of_key = dot(to.cell_keys + (x * C + c) * D, a.saved.cell_keys + at * in.D, in.D);
    to.shift[x * C + c] = dot(to.cell_values + (x * C + c) * E, a.saved.cell_values + at * in.E, in.E, of_key);
  }
}

// One head's means, laid out for the products over the keys; the lanes behind the last cluster give nothing.
static void prepare_means(const TailBackward &a, int64_t bh, const TailHeadGradients &to) {
  const TailInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
  for (int64_t c = 0; c < C; c++)
    for (int64_t d = 0; d < D; d++)
      to.centroids[c * D + d] =
          c < in.clusters && d < in.D ? a.saved.centroids[(bh * in.clusters + c) * in.D + d] : 0;
  pack_transposed(to.centroids, C, in.D, D, to.centroids_across, C);
  for (int64_t i = 0; i < C * D; i++) to.centroids[i] *= in.scale;
  for (int64_t x = 0; x < in.cells; x++)
    for (int64_t c = in.clusters; c < C; c++) {
      zero(to.cell_keys + (x * C + c) * D, D);
      zero(to.cell_values + (x * C + c) * E, E);
      to.shift[x * C + c] = to.of_lse[x * C + c] = to.residual[x * C + c] = 0;
      to.lse[x * C + c] = __builtin_inff();
    }
}

// One head's part in a tile of a cell's keys, places [at, at + count): adds to the tile's gradients and to the means'.
static void cell_tile_backward(const TailBackward &a, const float *keys, const float *values, int64_t bh, int64_t x,
                               int64_t at, int64_t count, const TailHeadGradients &of, int64_t *cursor, const TailGradScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
  const int32_t *top = a.saved.top + bh * in.clusters * in.topk;
  gemm(count, C, in.D, keys, D, 1, of.centroids_across, C, own.weights_t, C, false, in.scale);
  gemm(count, C, in.D, keys, D, 1, own.cell_keys_t, C, own.products_t, C, false);
  gemm(count, C, in.E, values, E, 1, own.cell_values_t, C, own.products_t, C, true);
  for (int64_t v = 0; v < C; v += W) {
    const vf lse = load(of.lse + x * C + v), residual = load(of.residual + x * C + v);
    const vf shift = load(of.shift + x * C + v), of_lse = load(of.of_lse + x * C + v);
    for (int64_t i = 0; i < count; i++) {
      const vf p = exp_nonpositive((load(own.weights_t + i * C + v) - lse) - residual);
      store(own.weights_t + i * C + v, p);
      store(own.products_t + i * C + v, p * ((load(own.products_t + i * C + v) - shift) + of_lse));
    }
  }
  for (int64_t c = 0; c < in.clusters; c++)
    for (int64_t &k = cursor[c]; k < in.topk && top[c * in.topk + k] >= 0 && top[c * in.topk + k] < at + count; k++) {
      const int64_t i = top[c * in.topk + k] - at;  // a top key is weighed by the members, not by the mean
      own.weights_t[i * C + c] = own.products_t[i * C + c] = 0;
      const float *of_key = of.keys + (c * in.topk + k) * D, *of_value = of.values + (c * in.topk + k) * E;
      for (int64_t d = 0; d < D; d++) own.grad_keys[i * D + d] += of_key[d];
      for (int64_t e = 0; e < E; e++) own.grad_values[i * E + e] += of_value[e];
    }
  gemm(count, D, in.clusters, own.products_t, C, 1, of.centroids, D, own.grad_keys, D, true);
  gemm(count, D, in.clusters, own.weights_t, C, 1, of.cell_keys + x * C * D, D, own.grad_keys, D, true);
  gemm(count, E, in.clusters, own.weights_t, C, 1, of.cell_values + x * C * E, E, own.grad_values, E, true);
  gemm(in.clusters, D, count, own.products_t, 1, C, keys, D, of.of_cells + x * in.clusters * D, D, true);
}

// All keys of one cell: their gradients, and the cell's part of those of the means of all heads that read them.
template <class T>
static void cell_backward(const TailBackward &a, const float *keys, const float *values, int64_t bg, int64_t x,
                          const NearKeyGradients &near, const TailHeadGradients *heads, const TailGradScratch &own) {
  const TailInputs &in = a.inputs;
  const int64_t group = in.H / in.G, b = bg / in.G, g = bg % in.G;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
  const int32_t *order = a.saved.key_order + bg * in.M, *bounds = a.saved.cell_offsets + bg * (in.cells + 1) + x;
  for (int64_t i = 0; i < group; i++) {
    const int64_t bh = b * in.H + g * group + i;
    zero(heads[i].of_cells + x * in.clusters * D, in.clusters * D);
    for (int64_t c = 0; c < in.clusters; c++) {
      const int32_t *top = a.saved.top + (bh * in.clusters + c) * in.topk;
      int64_t &k = own.cursor[i * in.clusters + c];
      for (k = 0; k < in.topk && top[k] >= 0 && top[k] < bounds[0]; k++) {}
    }
  }
  for (int64_t at = bounds[0]; at < bounds[1]; at += KEY_TILE) {
    const int64_t count = bounds[1] - at < KEY_TILE ? bounds[1] - at : KEY_TILE;
    for (int64_t i = 0; i < count; i++) {
      float *of_key = own.grad_keys + i * D, *of_value = own.grad_values + i * E;
      if (in.window == 0) {
        zero(of_key, D);
        zero(of_value, E);
      } else {
        load_row(near.keys + order[at + i] * D, D, of_key, D);
        scale_row(of_key, D, in.scale);
        load_row(near.values + order[at + i] * E, E, of_value, E);
      }
    }
    for (int64_t i = 0; i < group; i++) {
      if (group > 1 || at == bounds[0]) {
        pack_transposed(heads[i].cell_keys + x * C * D, C, in.D, D, own.cell_keys_t, C);
        pack_transposed(heads[i].cell_values + x * C * E, C, in.E, E, own.cell_values_t, C);
      }
      cell_tile_backward(a, keys + at * D, values + at * E, b * in.H + g * group + i, x, at, count, heads[i],
                         own.cursor + i * in.clusters, own);
    }
    for (int64_t i = 0; i < count; i++) {
      store_row(own.grad_keys + i * D, in.D, row_of<T>(a.grad_key, b, g, order[at + i]));
      store_row(own.grad_values + i * E, in.E, row_of<T>(a.grad_value, b, g, order[at + i]));
    }
  }
}

// The members of cluster c: what came from their own products, and their share of the gradient of the mean, if it is theirs.
template <class T>
static void tail_queries_backward(const TailBackward &a, int64_t bh, int64_t c, const NearHeadGradients &near,
                                  const TailHeadGradients &of, float *row) {
  const TailInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W);
  const int32_t *bounds = a.saved.offsets + bh * (in.clusters + 1) + c, *order = a.saved.order + bh * in.N;
  float *shared = of.means + c * D;
  for (int64_t x = 0; x < in.cells; x++)
    for (int64_t d = 0; d < D; d++) shared[d] += of.of_cells[(x * in.clusters + c) * D + d];
  for (int64_t i = bounds[0]; in.window > 0 && i < bounds[1]; i++)
    for (int64_t d = 0; d < D; d++) {
      shared[d] += near.means[order[i] * D + d];
      of.queries[i * D + d] += near.queries[order[i] * D + d];
    }
  if (a.grad_means) {
    float *to = a.grad_means + (bh * in.clusters + c) * in.D;
    for (int64_t d = 0; d < in.D; d++) to[d] = shared[d] * in.scale;
    zero(shared, D);
  } else {
    for (int64_t d = 0; d < D; d++) shared[d] /= (float)(bounds[1] - bounds[0]);
  }
  for (int64_t i = bounds[0]; i < bounds[1]; i++) {
    for (int64_t d = 0; d < D; d++) row[d] = (of.queries[i * D + d] + shared[d]) * in.scale;
    store_row(row, in.D, row_of<T>(a.grad_query, bh / in.H, bh % in.H, order[i]));
  }
}

// The lists come back through the caller's hands: nothing in them is an index before it was found to be one.
static bool tail_lists_hold(const TailBackward &a) {
  const TailInputs &in = a.inputs;
  auto sorted = [](const int32_t *order, const int32_t *offsets, int64_t tokens, int64_t groups) {
    bool hold = offsets[0] == 0 && offsets[groups] <= tokens;
    for (int64_t c = 0; c < groups; c++) hold &= offsets[c] <= offsets[c + 1];
    for (int64_t i = 0; i < tokens; i++) hold &= (uint32_t)order[i] < (uint32_t)tokens;
    return hold;
  };
  bool hold = labels_hold(in);
  for (int64_t bg = 0; bg < in.B * in.G; bg++)
    hold &= sorted(a.saved.key_order + bg * in.M, a.saved.cell_offsets + bg * (in.cells + 1), in.M, in.cells);
  for (int64_t bh = 0; hold && bh < in.B * in.H; bh++) {
    hold &= sorted(a.saved.order + bh * in.N, a.saved.offsets + bh * (in.clusters + 1), in.N, in.clusters);
    const int64_t bg = bh / in.H * in.G + bh % in.H / (in.H / in.G);
    const int64_t count = a.saved.cell_offsets[bg * (in.cells + 1) + in.cells];
    for (int64_t c = 0; c < in.clusters; c++) {
      const int32_t *top = a.saved.top + (bh * in.clusters + c) * in.topk;
      int64_t K = 0;
      for (; K < in.topk && top[K] >= 0; K++) hold &= top[K] < count && (K == 0 || top[K - 1] < top[K]);
      for (; K < in.topk; K++) hold &= top[K] == -1;
    }
  }
  return hold;
}

// 0 for the tokens of one head whose label is none.
template <class T>
static void zero_unlabelled(const Rows &grad, const int64_t *labels, int64_t none, int64_t b, int64_t h, int64_t tokens,
                            int64_t width) {
  for (int64_t i = 0; i < tokens; i++) {
    if (labels[i] < none) continue;
    T *row = row_of<T>(grad, b, h, i);
    for (int64_t d = 0; d < width; d++) narrow(0.0f, row + d);
  }
}

template <class T>
static int64_t tail_backward_of(const TailBackward &a, void *workspace) {
  const TailInputs &in = a.inputs;
  const int64_t group = in.H / in.G, all = in.B * in.G, wave = wave_of(in);
  Arena arena{(char *)workspace};
  const SortedKeys<float> sorted(arena, in, wave);
  const Each<TailHeadGradients> gradients(arena, wave * group, in);
  const PerThread<TailGradScratch> scratch(arena, in.threads, in);
  const NearKeys near_keys(arena, in, wave, true);
  const Each<NearHeadGradients> near_heads(arena, wave * group, in);
  const Each<NearKeyGradients> near_grads(arena, wave, in);
  const PerThread<NearGradScratch> near_scratch(arena, in.threads, in);
  if (!arena.base) return arena.used;
  if (!tail_lists_hold(a)) return BAD_LIST;

  const TailHeadGradients *heads = gradients.of;
  const NearHeadGradients *near = near_heads.of;
  const int64_t step = in.clusters / 16 + 1, steps = (in.clusters + step - 1) / step;
  for (int64_t first = 0; first < all; first += wave) {
    const int64_t now = all - first < wave ? all - first : wave;
    auto head_of = [&](int64_t i) { return first * group + i; };  // heads of a wave adjoin
    auto over_clusters = [&](int64_t task, auto &&run) {
      const int64_t from = task % steps * step;
      const int64_t head = task / steps;
      for (int64_t c = from; c < from + step && c < in.clusters; c++) run(head, head_of(head), c);
    };
    const Stage packed = {now, [&](int64_t i, int) {
      const int64_t bg = first + i, b = bg / in.G, g = bg % in.G;
      pack_keys<T>(in, a.saved.key_order + bg * in.M, a.saved.cell_offsets + bg * (in.cells + 1), bg, i, sorted);
      zero_unlabelled<T>(a.grad_key, in.cell + bg * in.M, in.cells, b, g, in.M, in.D);
      zero_unlabelled<T>(a.grad_value, in.cell + bg * in.M, in.cells, b, g, in.M, in.E);
      if (in.window > 0) pack_near_keys<T>(in, b, g, i, near_keys, true);
    }};
    const Stage of_near = {in.window > 0 ? now : 0, [&](int64_t i, int thread) {
      near_backward<T>(a, near_keys, i, first + i, near + i * group, near_grads.of[i], near_scratch.of[thread]);
    }};
    const Stage members = {now * group * steps, [&](int64_t task, int thread) {
      over_clusters(task, [&](int64_t head, int64_t bh, int64_t c) {
        tail_members_backward<T>(a, sorted, head / group, bh, c, near[head], heads[head], scratch.of[thread]);
        if (a.grad_cell_keys || a.grad_cell_values || a.grad_cell_lse) add_given_gradients(a, bh, c, heads[head]);
        shift_cells(a, bh, c, heads[head]);
      });
    }};
    const Stage means = {now * group, [&](int64_t i, int) { prepare_means(a, head_of(i), heads[i]); }};
    const Stage cells = {now * in.cells, [&](int64_t task, int thread) {
      const int64_t i = task / in.cells;
      cell_backward<T>(a, sorted.keys[i], sorted.values[i], first + i, task % in.cells, near_grads.of[i],
                       heads + i * group, scratch.of[thread]);
    }};
    const Stage queries = {now * group * steps, [&](int64_t task, int thread) {
      over_clusters(task, [&](int64_t head, int64_t bh, int64_t c) {
        const int64_t b = bh / in.H, h = bh % in.H;
        if (c == 0) zero_unlabelled<T>(a.grad_query, in.labels + bh * in.N, in.clusters, b, h, in.N, in.D);
        tail_queries_backward<T>(a, bh, c, near[head], heads[head], scratch.of[thread].queries);
      });
    }};
    parallel_stages(in.threads, packed, of_near, members, means, cells, queries);
  }
  return arena.used;
}

static int64_t tail_backward(const TailBackward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return tail_backward_of<decltype(x)>(a, workspace); });
}
