// Tasks over the threads of the process's one OpenMP runtime, torch's; on macOS over those of Grand Central Dispatch.
#if defined(_OPENMP) || defined(SUBQUAD_DISPATCH)
#define SUBQUAD_THREADS
#endif

// Calls run(thread) with different numbers below `threads`, of which some may come one after the other.
template <class Run>
static void on_threads(int threads, const Run &run) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  run(omp_get_thread_num());
#elif defined(SUBQUAD_DISPATCH)
  dispatch_apply_f(threads, DISPATCH_APPLY_AUTO, (void *)&run,
                   [](void *of, size_t thread) { (*(const Run *)of)((int)thread); });
#endif
}

// Tasks that must all be done before the next stage's begin.
template <class Run>
struct Stage {
  int64_t tasks;
  Run run;  // run(task, thread)
};
template <class Run>
Stage(int64_t, Run) -> Stage<Run>;

struct Progress {
  int64_t taken = 0, done = 0;
};

static inline void wait_a_little(int turn) {
#if defined(__x86_64__)
  if (turn < 10000) return _mm_pause();
#endif
#if defined(SUBQUAD_THREADS)
  if (turn >= 1000) sched_yield();  // somebody else may need the core to finish
#endif
}

// Take tasks until none is left, then wait for those that other threads have taken. A thread that has not begun has taken
// none, so that nobody waits for it.
template <class Run>
static void work_on(const Stage<Run> &stage, Progress &progress, int thread) {
  int64_t task;
  while ((task = __atomic_fetch_add(&progress.taken, 1, __ATOMIC_RELAXED)) < stage.tasks) {
    stage.run(task, thread);
    __atomic_fetch_add(&progress.done, 1, __ATOMIC_RELEASE);
  }
  for (int turn = 0; __atomic_load_n(&progress.done, __ATOMIC_ACQUIRE) < stage.tasks; turn++) wait_a_little(turn);
}

// Stages one after the other in one parallel region. A thread that the system wakes late finds its share done: on a busy
// machine a call waits for it once, not at every stage. Always asks for all `threads`: libgomp ends and restarts threads
// when teams change their size, which would slow torch's next call as well as ours.
template <class... Run>
static void parallel_stages(int threads, const Stage<Run> &...stages) {
#if defined(SUBQUAD_THREADS)
  if (threads > 1 && ((stages.tasks > 1) || ...)) {
    Progress progress[sizeof...(stages)];
    on_threads(threads, [&](int thread) {
      Progress *of = progress;
      (work_on(stages, *of++, thread), ...);
    });
    return;
  }
#endif
  auto all = [](const auto &stage) {
    for (int64_t task = 0; task < stage.tasks; task++) stage.run(task, 0);
  };
  (all(stages), ...);
}

// The same several times over, in one parallel region: stages call run(round, task, thread), round after round.
// `progress` is scratch for rounds·stages.
template <class... Run>
static void parallel_rounds(int threads, int64_t rounds, Progress *progress, const Stage<Run> &...stages) {
  const int64_t all = rounds * (int64_t)sizeof...(stages);
  for (int64_t i = 0; i < all; i++) progress[i] = Progress();
#if defined(SUBQUAD_THREADS)
  if (threads > 1) {
    on_threads(threads, [&](int thread) {
      Progress *of = progress;
      for (int64_t round = 0; round < rounds; round++)
        (work_on(Stage{stages.tasks, [&](int64_t task, int own) { stages.run(round, task, own); }}, *of++, thread), ...);
    });
    return;
  }
#endif
  for (int64_t round = 0; round < rounds; round++) {
    auto every = [&](const auto &stage) {
      for (int64_t task = 0; task < stage.tasks; task++) stage.run(round, task, 0);
    };
    (every(stages), ...);
  }
}

// Calls run(task, thread) for every task.
template <class Run>
static void parallel_for(int threads, int64_t tasks, Run &&run) {
  parallel_stages(threads, Stage{tasks, [&](int64_t task, int thread) { run(task, thread); }});
}

// Heads run side by side where that keeps the threads busy; a few heads are each split along the sequence.
static inline bool heads_side_by_side(int64_t heads, int64_t threads) {
  return heads % threads == 0 || heads >= 4 * threads;
}

// Equal pieces of scratch, made from the same sizes: one for each head, or each thread.
template <class Scratch>
struct Each {
  Scratch *of;
  template <class... Sizes>
  Each(Arena &arena, int64_t pieces, const Sizes &...sizes) {
    of = arena.take<Scratch>(pieces);
    for (int64_t i = 0; i < pieces; i++) {
      Scratch scratch(arena, sizes...);
      if (arena.base) of[i] = scratch;
    }
  }
};
template <class Scratch>
using PerThread = Each<Scratch>;
