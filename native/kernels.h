// What kernels know beside their arguments, and how they get into the runtime.
#ifndef STRATA_KERNELS_H
#define STRATA_KERNELS_H

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace strata {
struct Surroundings {
  uint64_t seed = 0;                             // of dropout
  uint64_t pass = 0;                             // counts the passes of a training
  float share = 1;                               // of the batch, that the part under way is
  std::vector<std::pair<float*, int64_t>> sums;  // gradients over a batch's parts, by slot
};
extern thread_local Surroundings* surroundings;  // of the step under way in this thread

bool register_kernels();  // once; false where the runtime's table is full
size_t scratch_bytes();   // of this thread
}  // namespace strata
#endif
