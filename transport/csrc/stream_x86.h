// Streaming copies on the registers that older x86-64 CPUs have: AVX2, and SSE2 which all have.
#pragma once

#include <cstddef>

namespace hymcache::stream_x86 {

#if defined(__x86_64__)
#define HYMCACHE_HAVE_STREAM_X86 1
// As CopyKernel::stream and fence; avx2() only on CPUs with AVX2.
void avx2(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
void sse2(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
void fence() noexcept;
#endif

}  // namespace hymcache::stream_x86
