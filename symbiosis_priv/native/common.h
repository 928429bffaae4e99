/* What every part of the library shares. The library has no state and no threads: callers slice the work and call it
 * from threads of their own. Nothing here knows Python or torch. */
#ifndef SYMBIOSIS_COMMON_H
#define SYMBIOSIS_COMMON_H

#include <stdint.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAVE_AVXVNNI 1
#ifdef __linux__
#define HAVE_AMX 1 /* old compilers come with assemblers that lack the instructions */
#endif
#define TARGET_AVXVNNI __attribute__((target("avx2,fma,avxvnni")))
#else
#define HAVE_AVXVNNI 0
#endif
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#else
#define HAVE_X86 0
#endif
#ifndef HAVE_AMX
#define HAVE_AMX 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") /* also understood by clang; sums stay in registers only if loops vanish */
#define EXPORT __attribute__((visibility("default")))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The thread's floating-point mode: rounding, and what happens to denormal numbers. Functions whose bits depend on it set
 * the default mode and then restore the thread's: torch.set_flush_denormal and libraries compiled with -ffast-math change
 * the mode of some threads only. */
#if HAVE_X86
INLINE uint64_t set_default_mode(void) {
    uint64_t mode = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return mode;
}
INLINE void restore_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__) && defined(__GNUC__)
INLINE uint64_t set_default_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(mode) : : "memory");
    return mode;
}
INLINE void restore_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
INLINE uint64_t set_default_mode(void) { return 0; }
INLINE void restore_mode(uint64_t mode) { (void)mode; }
#endif

/* Instruction sets that functions are written for, as their `isa` argument, better ones later. A CPU may lack
 * ISA_AVXVNNI and have ISA_AVX512; all others include those before them. Mirrored by `Isa` in __init__.py. */
enum isa { ISA_PORTABLE = 0, ISA_AVX2 = 1, ISA_AVXVNNI = 2, ISA_AVX512 = 3, ISA_AMX = 4 };

/* Packed weights are panels of PANEL outputs, padded to squares of PANEL x PANEL (packed.h). */
enum { PANEL = 64 };
INLINE int64_t tiles_of(int64_t width) { return (width + PANEL - 1) / PANEL; }

#endif
