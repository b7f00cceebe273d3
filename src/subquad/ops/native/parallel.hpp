// Tasks over the threads of the process's one OpenMP runtime, torch's.

// Calls run(task, thread) for every task. Always asks for all `threads`: libgomp ends and restarts threads when teams
// change their size, which would slow torch's next call as well as ours.
template <class Run>
static void parallel_for(int threads, int64_t tasks, Run &&run) {
#if defined(_OPENMP)
  if (threads > 1 && tasks > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) run(task, omp_get_thread_num());
    return;
  }
#endif
  for (int64_t task = 0; task < tasks; task++) run(task, 0);
}
