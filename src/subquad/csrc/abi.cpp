// The C interface of the native library, and which instruction-set variant of the kernels it calls.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "kernels.hpp"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// SUBQUAD_VARIANTS is a definition of the build: VARIANT(fastest) … VARIANT(one that runs everywhere)
#define VARIANT(name) extern const Kernels kernels_##name;
SUBQUAD_VARIANTS
#undef VARIANT

namespace {

constexpr int ABI_VERSION = 20;  // one higher with every change that an older `kernels/native/*.py` cannot call

namespace runs {

#if defined(__x86_64__)
// Not among the names that all compilers' __builtin_cpu_supports knows.
bool f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
bool avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c() && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
bool avx512() {
  return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool avx512vpopcnt() {
  return avx512() && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512ifma");
}
// Not among those names either.
bool avx512bf16() {
  unsigned eax, ebx, ecx, edx;
  return avx512vpopcnt() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & bit_AVX512BF16);
}
// Linux lets a process use tiles once it has asked, and not if the kernel, or a small stack for signals, cannot save them.
bool amxbf16() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned TILE = 1u << 24, BF16 = 1u << 22;  // of edx; compilers have several names for them
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool runs_here = [] {
    unsigned eax, ebx, ecx, edx;
    return avx512bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & TILE) && (edx & BF16) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  }();
  return runs_here;
#else
  return false;
#endif
}
bool baseline() { return true; }
#elif defined(__aarch64__)
bool neonbf16() {
#if defined(__linux__)
  constexpr unsigned long BF16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return getauxval(AT_HWCAP2) & BF16;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
bool neon() { return true; }  // of all such processors
#else
bool baseline() { return true; }
#endif

}  // namespace runs

struct Variant {
  const char *name;
  const Kernels *kernels;
  bool (*runs)();
};

#define VARIANT(name) {#name, &kernels_##name, runs::name},
constexpr Variant VARIANTS[] = {SUBQUAD_VARIANTS};
#undef VARIANT

const Variant *fastest() {
  for (const Variant &variant : VARIANTS)
    if (variant.runs()) return &variant;
  return nullptr;  // not reached: the last runs everywhere
}

std::atomic<const Variant *> in_use{fastest()};

}  // namespace

EXPORT int subquad_abi_version(void) { return ABI_VERSION; }

// Names of the variants that run on this CPU, fastest first, with spaces between.
EXPORT const char *subquad_variants(void) {
  static const std::string names = [] {
    std::string found;
    for (const Variant &variant : VARIANTS)
      if (variant.runs()) found += (found.empty() ? "" : " ") + std::string(variant.name);
    return found;
  }();
  return names.c_str();
}

EXPORT const char *subquad_variant(void) { return in_use.load()->name; }

// 0, or −1 where no variant of that name runs here. "" is the fastest.
EXPORT int subquad_use_variant(const char *name) {
  if (!*name) {
    in_use = fastest();
    return 0;
  }
  for (const Variant &variant : VARIANTS)
    if (!std::strcmp(variant.name, name) && variant.runs()) {
      in_use = &variant;
      return 0;
    }
  return -1;
}

EXPORT int subquad_has_threads(void) {
#if defined(_OPENMP) || defined(SUBQUAD_DISPATCH)
  return 1;
#else
  return 0;
#endif
}

namespace {

// Not std::to_string, whose table of digits the library would export.
std::string decimal(unsigned long long number) {
  char text[24];
  std::snprintf(text, sizeof text, "%llu", number);
  return text;
}

std::string quoted(const std::string &text) { return '"' + text + '"'; }

// "name": [bytes, [field, kind, offset], …]
template <class T>
std::string layout() {
  std::string text = quoted(Layout<T>::NAME) + ": [" + decimal(sizeof(T));
  for (const Field &field : Layout<T>::FIELDS)
    text += ", [" + quoted(field.name) + ", " + quoted(field.kind.of + std::string(field.kind.how)) + ", " +
            decimal(field.offset) + "]";
  return text + "]";
}

template <class... T>
std::string layouts() {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + layout<T>()), ...);
  return text;
}

}  // namespace

// What Python packs arguments by, as JSON: {"structures": {…}, "kernels": {name: the structure of its arguments}}.
EXPORT const char *subquad_interface(void) {
  static const std::string text = [] {
#define KERNEL(name, Arguments) , Arguments
    const std::string all = layouts<ClusteredInputs, Saved, BucketSet, BucketInputs, HashLayer, HashTerm,
                                    FeatureInputs, TailInputs, TailSaved, CodedTerm, ListedInputs, ExactInputs,
                                    MergedPart KERNELS>();
#undef KERNEL
    std::string kernels;
#define KERNEL(name, Arguments) kernels += (kernels.empty() ? "" : ", ") + quoted(#name) + ": " + quoted(#Arguments);
    KERNELS
#undef KERNEL
    return "{\"structures\": {" + all + "}, \"kernels\": {" + kernels + "}}";
  }();
  return text.c_str();
}

#define KERNEL(name, Arguments)                                                    \
  EXPORT int64_t subquad_##name(const Arguments *arguments, void *workspace) {     \
    const Variant *variant = in_use.load();                                        \
    while (!variant->kernels->name) variant++; /* the last has every kernel */     \
    return variant->kernels->name(*arguments, workspace);                          \
  }
KERNELS
#undef KERNEL
