// exp in the caller's own registers: torch's is a call for each vector.

#pragma once

#include "tensors.h"

#include <immintrin.h>

namespace {

// 2^n * x for a whole number n, rounded once. x is near 1, so 2^n alone may be too small for a float.
inline __attribute__((always_inline)) Lanes scaled(Lanes x, Lanes n) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_scalef_ps(x, n);
#else
  const auto two_to = [](__m256i n) {
    const __m256i exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
    return Lanes(_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  };
  const __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1);
  return x * two_to(half) * two_to(_mm256_sub_epi32(power, half));
#endif
}

// Bits are those of torch's, which is Sleef's expf of 1 ULP (sleefsimdsp.c): e^x = 2^n * e^r with r as
// near to 0 as can be, and e^r = 1 + r + r^2 * (a polynomial of the fifth degree).
inline __attribute__((always_inline)) Lanes exponential(Lanes x) {
  constexpr float kPolynomial[] = {0.00139304355252534151f, 0.00833336077630519867f,
                                   0.0416664853692054749f, 0.166666671633720398f, 0.5f};
  constexpr float kLog2Upper = 0.693145751953125f, kLog2Lower = 1.428606765330187045e-06f;
  // Beyond these all are 0 or infinite.
  x = at::vec::clamp_min(at::vec::clamp_max(x, Lanes(105.f)), Lanes(-105.f));
  const Lanes n = (x * Lanes(1.442695040888963407f)).round();
  const Lanes r = at::vec::fmadd(n, Lanes(-kLog2Lower), at::vec::fmadd(n, Lanes(-kLog2Upper), x));
  Lanes sum(0.000198527617612853646f);
  for (const float next : kPolynomial) sum = at::vec::fmadd(sum, r, Lanes(next));
  return scaled(Lanes(1.f) + at::vec::fmadd(r * r, sum, r), n);
}

}  // namespace
