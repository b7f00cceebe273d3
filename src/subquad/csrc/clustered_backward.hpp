// The whole backward pass, from the clusters, top keys and log-sum-exps that the forward pass saved.
//
// With w the members' own weights on the top keys T, P the centroids' weights, m the mass and r the rest:
//
//     out_i = m Σ_T w_il V_l + r          dR = Σ_i dO_i        dm = Σ_i δ_i,  δ_i = Σ_T w_il dO_i·V_l
//     members    ds_il = m w_il (dO_i·V_l − δ_i)               dV_l += Σ_i m w_il dO_i
//     centroids  dP_l = dR·V_l outside T, dm inside            dS_l = P_l (dP_l − dR·r − dm m)
//
// With log-sum-exps and their gradients g_i, where lse_i = ln Σ_T e^{s_il} − ln m:
//
//     members    ds_il += w_il g_i                             dm −= Σ_i g_i / m
//     without T  lse_i is the centroid's:                      dS_l += P_l Σ_i g_i
//
// If nobody reads `out`, values are not read either: they cannot reach a gradient.
//
// Memory stays O(N): groups of heads go one after the other, each with buffers for its own products only.

constexpr int64_t GRAD_CHUNK = 2048;  // keys per task, fixed so that results do not depend on the threads

struct HeadGradients {
  float *rest, *mass;          // (C,E'), (C): dR, dm
  float *of_lse;               // (C): Σ g of a cluster's members where there are no top keys
  float *keys, *values;        // (C,K,D'), (C,K,E'): from the members
  float *queries;              // (N,D') in the order of the clusters: from the members
  float *of_centroids;         // (chunks,C,D')
  float *centroids;            // (C,D') padded rows
  float *centroids_scaled;     // (D',C') transposed
  float *rest_transposed;      // (E',C')
  float *shift, *lse, *residual;  // (C'): dR·r + dm·m

  HeadGradients(Arena &arena, const ClusteredInputs &in) {
    const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
    rest = arena.take<float>(C * E);
    mass = arena.take<float>(C);
    of_lse = arena.take<float>(C);
    keys = arena.take<float>(in.clusters * in.topk * D);
    values = arena.take<float>(in.clusters * in.topk * E);
    queries = arena.take<float>(in.topk ? in.N * D : 0);
    of_centroids = arena.take<float>((in.M + GRAD_CHUNK - 1) / GRAD_CHUNK * in.clusters * D);
    centroids = arena.take<float>(C * D);
    centroids_scaled = arena.take<float>(D * C);
    rest_transposed = arena.take<float>(E * C);
    shift = arena.take<float>(C);
    lse = arena.take<float>(C);
    residual = arena.take<float>(C);
  }
};

struct GradScratch {
  float *key_rows, *value_rows, *keys, *values, *hidden;  // a cluster's top keys: rows and transposed
  float *queries, *grads, *of_lse, *weights, *products;  // a tile of members
  float *tile_keys, *tile_values, *grad_keys, *grad_values, *weights_t, *products_t;  // a tile of keys
  int64_t *cursor;  // (heads of a group, C) how far each list of top keys has been walked

  GradScratch(Arena &arena, const ClusteredInputs &in) {
    const int64_t K = round_up(in.topk, W), D = round_up(in.D, W), E = round_up(in.E, W), C = round_up(in.clusters, W);
    key_rows = arena.take<float>(K * D);
    value_rows = arena.take<float>(K * E);
    keys = arena.take<float>(D * K);
    values = arena.take<float>(E * K);
    hidden = arena.take<float>(K);
    queries = arena.take<float>(MEMBER_TILE * D);
    grads = arena.take<float>(MEMBER_TILE * E);
    of_lse = arena.take<float>(MEMBER_TILE);
    weights = arena.take<float>(MEMBER_TILE * K);
    products = arena.take<float>(MEMBER_TILE * K);
    tile_keys = arena.take<float>(KEY_TILE * D);
    tile_values = arena.take<float>(KEY_TILE * E);
    grad_keys = arena.take<float>(KEY_TILE * D);
    grad_values = arena.take<float>(KEY_TILE * E);
    weights_t = arena.take<float>(KEY_TILE * C);
    products_t = arena.take<float>(KEY_TILE * C);
    cursor = arena.take<int64_t>(in.H / in.G * in.clusters);
  }
};

// A tile's weights w become ds in the place of the products, where g alone is differentiated.
static void lse_gradient(const GradScratch &own, int64_t count, int64_t lanes, float scale) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < lanes; j += W)
      store(own.products + i * lanes + j, load(own.weights + i * lanes + j) * own.of_lse[i] * scale);
}

// A tile's weights and products dO·V become m·w and ds; returns Σ δ. `of_lse` has g of each row, or is null.
static float softmax_gradient(const GradScratch &own, const float *of_lse, int64_t count, int64_t lanes, float mass,
                              float scale) {
  float total = 0;
  for (int64_t i = 0; i < count; i++) {
    float *w = own.weights + i * lanes, *p = own.products + i * lanes;
    vf weighted = {};
    for (int64_t j = 0; j < lanes; j += W) weighted += load(w + j) * load(p + j);
    const float delta = sum(weighted);
    total += delta;
    for (int64_t j = 0; j < lanes; j += W) {
      const vf weight = load(w + j), mw = weight * mass;
      store(w + j, mw);
      vf ds = mw * (load(p + j) - delta);
      if (of_lse) ds += weight * of_lse[i];
      store(p + j, ds * scale);
    }
  }
  return total;
}

// What cluster c's members give: dR, dm, their queries' gradients, and those of the cluster's top keys and values.
template <class T>
static void members_backward(const ClusteredBackward &a, const Positions &keys, int64_t b, int64_t h, int64_t c,
                             const HeadGradients &to, const GradScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t row = (b * in.H + h) * in.clusters + c, g = h / (in.H / in.G);
  const int64_t K = in.topk < keys.count ? in.topk : keys.count;
  const int64_t lanes = round_up(K, W), D = round_up(in.D, W), E = round_up(in.E, W);
  const int32_t *bounds = a.saved.offsets + (b * in.H + h) * (in.clusters + 1) + c;
  const int32_t *order = a.saved.order + (b * in.H + h) * in.N;
  float *grad_rest = to.rest + c * E, *grad_keys = to.keys + c * in.topk * D;
  float *grad_values = to.values + c * in.topk * E;
  zero(grad_rest, E);
  zero(grad_keys, in.topk * D);
  zero(grad_values, in.topk * E);
  to.mass[c] = to.of_lse[c] = 0;
  if (bounds[0] == bounds[1]) return;
  if (K) {
    gather<T>(in.key, b, g, keys, a.saved.top + row * in.topk, K, in.D, own.key_rows, D);
    pack_transposed(own.key_rows, lanes, in.D, D, own.keys, lanes);
    if (a.grad_out.data) {
      gather<T>(in.value, b, g, keys, a.saved.top + row * in.topk, K, in.E, own.value_rows, E);
      pack_transposed(own.value_rows, lanes, in.E, E, own.values, lanes);
    }
    for (int64_t j = 0; j < lanes; j++) own.hidden[j] = j < K ? 0 : -__builtin_inff();
  }
  for (int64_t first = bounds[0]; first < bounds[1]; first += MEMBER_TILE) {
    const int64_t count = bounds[1] - first < MEMBER_TILE ? bounds[1] - first : MEMBER_TILE;
    if (a.grad_out.data) {
      pack_rows<T>(a.grad_out, b, h, order, first, count, in.E, own.grads, E);
      for (int64_t i = 0; i < count; i++)
        for (int64_t e = 0; e < E; e++) grad_rest[e] += own.grads[i * E + e];
    }
    const float *of_lse = nullptr;
    if (a.grad_lse) {
      of_lse = own.of_lse;
      for (int64_t i = 0; i < count; i++) {
        own.of_lse[i] = a.grad_lse[(b * in.H + h) * in.N + order[first + i]];
        to.of_lse[c] += own.of_lse[i];
      }
    }
    if (!K) continue;
    pack_rows<T>(in.query, b, h, order, first, count, in.D, own.queries, D);
    gemm(count, lanes, in.D, own.queries, D, 1, own.keys, lanes, own.weights, lanes, false);
    softmax_rows(own.weights, count, lanes, in.scale, own.hidden);
    if (a.grad_out.data) {
      gemm(count, lanes, in.E, own.grads, E, 1, own.values, lanes, own.products, lanes, false);
      to.mass[c] += softmax_gradient(own, of_lse, count, lanes, a.saved.mass[row], in.scale);
      gemm(K, E, count, own.weights, 1, lanes, own.grads, E, grad_values, E, true);
    } else {
      lse_gradient(own, count, lanes, in.scale);
    }
    gemm(count, D, K, own.products, lanes, 1, own.key_rows, D, to.queries + first * D, D, false);
    gemm(K, D, count, own.products, 1, lanes, own.queries, D, grad_keys, D, true);
  }
  if (K && a.grad_lse) {  // it reaches the centroid through the mass alone
    to.mass[c] -= to.of_lse[c] / a.saved.mass[row];
    to.of_lse[c] = 0;
  }
}

// One head's centroids and gradients of the rest, laid out for the products over the keys.
static void prepare_centroids(const ClusteredBackward &a, int64_t bh, const HeadGradients &to) {
  const ClusteredInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
  zero(to.rest + in.clusters * E, (C - in.clusters) * E);
  for (int64_t c = 0; c < C; c++) {
    const int64_t row = bh * in.clusters + c;
    const bool valid = c < in.clusters;
    for (int64_t d = 0; d < D; d++)
      to.centroids[c * D + d] = valid && d < in.D ? a.saved.centroids[row * in.D + d] * in.scale : 0;
    to.lse[c] = valid ? a.saved.lse[row] : __builtin_inff();
    to.residual[c] = valid ? a.saved.residual[row] : 0;
    to.shift[c] = 0;
    if (!valid) to.of_lse[c] = 0;
    if (!valid) continue;
    if (a.grad_out.data)
      to.shift[c] = dot(to.rest + c * E, a.saved.rest + row * in.E, in.E) + to.mass[c] * a.saved.mass[row];
    else
      to.shift[c] = to.mass[c] * a.saved.mass[row];
  }
  pack_transposed(to.centroids, C, in.D, D, to.centroids_scaled, C);
  pack_transposed(to.rest, C, in.E, E, to.rest_transposed, C);
}

// weights_t ← P = e^{S − lse}; products_t ← P (dP − shift + Σ g): the gradient of S, whose scale is in the centroids.
// If P is 1, dP − shift is exactly 0, to which Σ g is added afterwards.
static void centroid_gradient(const GradScratch &own, const HeadGradients &of, int64_t count, int64_t columns) {
  for (int64_t v = 0; v < columns; v += W) {
    const vf lse = load(of.lse + v), residual = load(of.residual + v), shift = load(of.shift + v);
    const vf of_lse = load(of.of_lse + v);
    for (int64_t i = 0; i < count; i++) {
      float *weights = own.weights_t + i * columns + v, *products = own.products_t + i * columns + v;
      vf p = exp_nonpositive((load(weights) - lse) - residual);
      store(weights, p);
      store(products, p * ((load(products) - shift) + of_lse));
    }
  }
}

// Calls run(c, slot, row of the tile) for every top key of every cluster among the keys [rank, rank + count). Top keys
// ascend and tiles come in the order of the keys, so each cluster's list is walked once, from its cursor on.
template <class Run>
static void for_top_keys(const int32_t *top, int64_t C, int64_t stride, int64_t K, const int64_t *cursor, int64_t rank,
                         int64_t count, Run &&run) {
  for (int64_t c = 0; c < C; c++)
    for (int64_t slot = cursor[c]; slot < K && top[c * stride + slot] < rank + count; slot++)
      run(c, slot, top[c * stride + slot] - rank);
}

// One head's part in a tile of keys: adds to the tile's gradients and to the centroids'.
static void tile_backward(const ClusteredBackward &a, int64_t bh, int64_t K, int64_t rank, int64_t count,
                          const HeadGradients &of, int64_t chunk, int64_t *cursor, const GradScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t C = round_up(in.clusters, W), D = round_up(in.D, W), E = round_up(in.E, W);
  const int32_t *top = a.saved.top + bh * in.clusters * in.topk;
  gemm(count, C, in.D, own.tile_keys, D, 1, of.centroids_scaled, C, own.weights_t, C, false);
  if (a.grad_out.data)
    gemm(count, C, in.E, own.tile_values, E, 1, of.rest_transposed, C, own.products_t, C, false);
  else
    zero(own.products_t, count * C);
  for_top_keys(top, in.clusters, in.topk, K, cursor, rank, count,
               [&](int64_t c, int64_t, int64_t i) { own.products_t[i * C + c] = of.mass[c]; });  // dP inside T
  centroid_gradient(own, of, count, C);
  for_top_keys(top, in.clusters, in.topk, K, cursor, rank, count, [&](int64_t c, int64_t slot, int64_t i) {
    own.weights_t[i * C + c] = 0;  // a top key's value is weighed by the members, not by the centroid
    const float *keys = of.keys + (c * in.topk + slot) * D, *values = of.values + (c * in.topk + slot) * E;
    for (int64_t d = 0; d < D; d++) own.grad_keys[i * D + d] += keys[d];
    for (int64_t e = 0; e < E; e++) own.grad_values[i * E + e] += values[e];
    cursor[c]++;
  });
  gemm(count, D, in.clusters, own.products_t, C, 1, of.centroids, D, own.grad_keys, D, true);
  if (a.grad_out.data) gemm(count, E, in.clusters, own.weights_t, C, 1, of.rest, E, own.grad_values, E, true);
  float *of_centroids = of.of_centroids + chunk * in.clusters * D;
  gemm(in.clusters, D, count, own.products_t, 1, C, own.tile_keys, D, of_centroids, D, true);
}

// A chunk of one key head's keys: the gradients of its keys and values, and its part of the centroids'.
template <class T>
static void keys_backward(const ClusteredBackward &a, const Positions &keys, int64_t b, int64_t g, int64_t chunk,
                          const HeadGradients *heads, const GradScratch &own) {
  const ClusteredInputs &in = a.inputs;
  const int64_t group = in.H / in.G, D = round_up(in.D, W), E = round_up(in.E, W);
  const int64_t K = in.topk < keys.count ? in.topk : keys.count;
  const int64_t start = chunk * GRAD_CHUNK, end = start + GRAD_CHUNK < keys.count ? start + GRAD_CHUNK : keys.count;
  for (int64_t i = 0; i < group; i++) {
    zero(heads[i].of_centroids + chunk * in.clusters * D, in.clusters * D);
    for (int64_t c = 0; c < in.clusters; c++) {
      const int32_t *top = a.saved.top + ((b * in.H + g * group + i) * in.clusters + c) * in.topk;
      int64_t &cursor = own.cursor[i * in.clusters + c];
      for (cursor = 0; cursor < K && top[cursor] < start; cursor++) {}
    }
  }
  for (int64_t rank = start; rank < end; rank += KEY_TILE) {
    const int64_t count = end - rank < KEY_TILE ? end - rank : KEY_TILE;
    pack_rows<T>(in.key, b, g, keys.at, rank, count, in.D, own.tile_keys, D);
    pack_rows<T>(in.value, b, g, keys.at, rank, count, in.E, own.tile_values, E);
    zero(own.grad_keys, count * D);
    zero(own.grad_values, count * E);
    for (int64_t i = 0; i < group; i++)
      tile_backward(a, b * in.H + g * group + i, K, rank, count, heads[i], chunk, own.cursor + i * in.clusters, own);
    for (int64_t i = 0; i < count; i++) {
      store_row(own.grad_keys + i * D, in.D, row_of<T>(a.grad_key, b, g, keys[rank + i]));
      store_row(own.grad_values + i * E, in.E, row_of<T>(a.grad_value, b, g, keys[rank + i]));
    }
  }
}

// The members of cluster c: what came from their own products, and their share of the centroid's gradient.
template <class T>
static void queries_backward(const ClusteredBackward &a, const Positions &keys, int64_t b, int64_t h, int64_t c,
                             const HeadGradients &of, float *row) {
  const ClusteredInputs &in = a.inputs;
  const int64_t D = round_up(in.D, W), chunks = (keys.count + GRAD_CHUNK - 1) / GRAD_CHUNK;
  const int32_t *bounds = a.saved.offsets + (b * in.H + h) * (in.clusters + 1) + c;
  const int32_t *order = a.saved.order + (b * in.H + h) * in.N;
  float *shared = of.centroids + c * D;  // its rows have been read: the members' share of dQ^c takes their place
  zero(shared, D);
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t d = 0; d < D; d++) shared[d] += of.of_centroids[(chunk * in.clusters + c) * D + d];
  for (int64_t d = 0; d < D; d++) shared[d] *= in.scale / (float)(bounds[1] - bounds[0]);
  const bool own_products = in.topk > 0 && keys.count > 0;
  for (int64_t i = bounds[0]; i < bounds[1]; i++) {
    const float *own = of.queries + i * D;
    for (int64_t d = 0; d < D; d++) row[d] = own_products ? own[d] + shared[d] : shared[d];
    store_row(row, in.D, row_of<T>(a.grad_query, b, h, order[i]));
  }
}

// The lists come back through the caller's hands: nothing in them is an index before it was found to be one.
static bool lists_hold(const ClusteredBackward &a, const Masks &queries, const Masks &keys) {
  const ClusteredInputs &in = a.inputs;
  bool hold = true;
  for (int64_t bh = 0; bh < in.B * in.H; bh++) {
    const int64_t valid = queries.of(bh / in.H).count, M = keys.of(bh / in.H).count, K = in.topk < M ? in.topk : M;
    const int32_t *order = a.saved.order + bh * in.N, *offsets = a.saved.offsets + bh * (in.clusters + 1);
    hold &= offsets[0] == 0 && offsets[in.clusters] == valid;
    for (int64_t c = 0; c < in.clusters; c++) hold &= offsets[c] <= offsets[c + 1];
    for (int64_t i = 0; i < valid; i++) hold &= (uint32_t)order[i] < (uint32_t)in.N;
    for (int64_t c = 0; K && c < in.clusters; c++) {
      const int32_t *top = a.saved.top + (bh * in.clusters + c) * in.topk;
      hold &= top[0] >= 0 && top[K - 1] < M;
      for (int64_t i = 1; i < K; i++) hold &= top[i - 1] < top[i];
    }
  }
  return hold;
}

template <class T>
static int64_t clustered_backward_of(const ClusteredBackward &a, void *workspace) {
  const ClusteredInputs &in = a.inputs;
  const int64_t group = in.H / in.G, all = in.B * in.G, wave = all < 2 * in.threads ? all : 2 * in.threads;
  Arena arena{(char *)workspace};
  const Masks queries(arena, in.query_valid, in.B, in.N), keys(arena, in.key_valid, in.B, in.M);
  HeadGradients *heads = arena.take<HeadGradients>(wave * group);
  for (int64_t i = 0; i < wave * group; i++) {
    const HeadGradients head(arena, in);
    if (arena.base) heads[i] = head;
  }
  const PerThread<GradScratch> scratch(arena, in.threads, in);
  if (!arena.base) return arena.used;
  if (!lists_hold(a, queries, keys)) return BAD_LIST;

  const int64_t step = in.clusters / 16 + 1, steps = (in.clusters + step - 1) / step;
  const int64_t chunks = (in.M + GRAD_CHUNK - 1) / GRAD_CHUNK;
  for (int64_t first = 0; first < all; first += wave) {
    const int64_t now = all - first < wave ? all - first : wave;
    auto head_of = [&](int64_t i) { return first / in.G * in.H + first % in.G * group + i; };  // heads of a wave adjoin
    auto over_clusters = [&](int64_t task, int thread, auto &&run) {
      const int64_t bh = head_of(task / steps), from = task % steps * step;
      for (int64_t c = from; c < from + step && c < in.clusters; c++)
        run(bh / in.H, bh % in.H, c, heads[task / steps], scratch.of[thread]);
    };
    const Stage members = {now * group * steps, [&](int64_t task, int thread) {
      over_clusters(task, thread, [&](int64_t b, int64_t h, int64_t c, const HeadGradients &head, const GradScratch &own) {
        members_backward<T>(a, keys.of(b), b, h, c, head, own);
      });
    }};
    const Stage centroids = {now * group, [&](int64_t i, int) { prepare_centroids(a, head_of(i), heads[i]); }};
    const Stage over_keys = {now * chunks, [&](int64_t task, int thread) {
      const int64_t i = task / chunks, chunk = task % chunks, b = (first + i) / in.G, g = (first + i) % in.G;
      if (chunk == 0) {
        zero_padding<T>(a.grad_key, in.key_valid, b, g, in.M, in.D);
        zero_padding<T>(a.grad_value, in.key_valid, b, g, in.M, in.E);
      }
      if (chunk * GRAD_CHUNK < keys.of(b).count)
        keys_backward<T>(a, keys.of(b), b, g, chunk, heads + i * group, scratch.of[thread]);
    }};
    const Stage over_queries = {now * group * steps, [&](int64_t task, int thread) {
      over_clusters(task, thread, [&](int64_t b, int64_t h, int64_t c, const HeadGradients &head, const GradScratch &own) {
        if (c == 0) zero_padding<T>(a.grad_query, in.query_valid, b, h, in.N, in.D);
        queries_backward<T>(a, keys.of(b), b, h, c, head, own.queries);
      });
    }};
    parallel_stages(in.threads, members, centroids, over_keys, over_queries);
  }
  return arena.used;
}

static int64_t clustered_backward(const ClusteredBackward &a, void *workspace) {
  return by_dtype(a.inputs.dtype, [&](auto x) { return clustered_backward_of<decltype(x)>(a, workspace); });
}
