// Stable counting sort by cluster, and the clusters' mean rows.

// `order` gets the positions of all ranks, cluster after cluster; `offsets` (C+1) where each starts.
static void sort_by_label(const int32_t *labels, const Positions &positions, int64_t C, int32_t *order,
                          int32_t *offsets) {
  for (int64_t c = 0; c <= C; c++) offsets[c] = 0;
  for (int64_t i = 0; i < positions.count; i++) offsets[labels[i] + 1]++;
  for (int64_t c = 0; c < C; c++) offsets[c + 1] += offsets[c];
  // Filling moves each start to its cluster's end, the start of the next one: moved up by one, they are starts again.
  for (int64_t i = 0; i < positions.count; i++) order[offsets[labels[i]]++] = (int32_t)positions[i];
  for (int64_t c = C; c > 0; c--) offsets[c] = offsets[c - 1];
  offsets[0] = 0;
}

// The mean of the rows at `count` positions, in the order of the sequence, as the reference adds them; 0 for none.
template <class T>
static void mean_row(const Rows &rows, int64_t b, int64_t h, const int32_t *positions, int64_t count, int64_t width,
                     float *mean) {
  for (int64_t d = 0; d < width; d++) mean[d] = 0;
  for (int64_t i = 0; i < count; i++) {
    const T *row = row_of<T>(rows, b, h, positions[i]);
    for (int64_t d = 0; d < width; d++) mean[d] += widen(row[d]);
  }
  const float members = count > 0 ? (float)count : 1.0f;
  for (int64_t d = 0; d < width; d++) mean[d] /= members;
}
