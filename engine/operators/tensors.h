// Tensors on a CPU, torch's vectors of numbers, and its team of threads, as all operators use them.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using torch::stable::Tensor;
using Lanes = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Lanes::size();
constexpr int64_t kLine = 64;      // bytes of a line of the caches
constexpr int64_t kAhead = 4096;   // bytes from what is read to what is fetched for later
constexpr int64_t kGrain = 32768;  // numbers for which another thread pays, as torch counts

const float* read(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == torch::headeronly::ScalarType::Float, "not float32");
  return static_cast<const float*>(tensor.data_ptr());
}

float* write(const Tensor& tensor) { return const_cast<float*>(read(tensor)); }

Tensor empty(std::vector<int64_t> sizes, int32_t dtype = aoti_torch_dtype_float32()) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < tensor.dim(); ++i) sizes.push_back(tensor.size(i));
  return sizes;
}

// The rows of a tensor, its last dimension. They may lie apart.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : start_(read(tensor)) {
    STD_TORCH_CHECK(tensor.stride(tensor.dim() - 1) == 1, "rows with gaps");
    for (int64_t d = tensor.dim() - 1; d-- > 0;) {
      const int64_t size = tensor.size(d), stride = tensor.stride(d);
      if (!outer_.empty() && stride == outer_.back().size * outer_.back().stride)
        outer_.back().size *= size;
      else if (size != 1)
        outer_.push_back({size, stride});
    }
  }

  const float* operator[](int64_t row) const {
    const float* at = start_;
    for (const auto& [size, stride] : outer_) {
      at += row % size * stride;
      row /= size;
    }
    return at;
  }

 private:
  struct Dimension {
    int64_t size, stride;
  };
  const float* start_;
  std::vector<Dimension> outer_;  // without those of size 1, and without two that are as one
};

template <class Work>
void in_parallel(int64_t count, int64_t cost_of_one, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost_of_one));
  if (count <= grain) return work(0, count);
  torch::stable::parallel_for(0, count, grain, work);
}

// Brings what is read soon to the nearest cache. Processors fetch the next lines of memory by
// themselves, but too late, and never beyond a page.
inline __attribute__((always_inline)) void fetch(const void* at, int64_t bytes) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < bytes; line += kLine)
    __builtin_prefetch(static_cast<const char*>(at) + line);
}

// Room that a thread keeps from call to call, because fresh pages cost more than what fills them.
float* room_for(int64_t count) {
  // A vector that lies in two lines is read twice.
  thread_local std::vector<float> room;
  if (room.size() < count + kLine) room.resize(count + kLine);
  const uintptr_t start = reinterpret_cast<uintptr_t>(room.data());
  return reinterpret_cast<float*>((start + kLine - 1) / kLine * kLine);
}

}  // namespace
