// Torch's caching allocator, driven by lines on stdin.
//   options; memory fraction (0: unset); then `a ID BYTES STREAM` and `f ID`
// Prints the bytes reserved and allocated after each of them, or `oom`, or `error …`; then `retries N`, then the segments:
//   S bytes stream small expandable, and bytes:allocated of each block
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <unordered_map>

int main() {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::unordered_map<long, void*> live;
  std::string options, verb;
  double fraction = 0;
  std::getline(std::cin, options);
  std::cin >> fraction;
  try {
    c10::cuda::detail::init_p2p_access_cache(1);
    allocator->init(1);
    c10::CachingAllocator::setAllocatorSettings(options);
    if (fraction > 0) allocator->setMemoryFraction(fraction, 0);
    for (long id; std::cin >> verb >> id;) {
      if (verb == "a") {
        size_t bytes = 0, stream = 0;
        std::cin >> bytes >> stream;
        live[id] = allocator->raw_alloc_with_stream(bytes, (cudaStream_t)stream);
      } else {
        allocator->raw_delete(live[id]);
      }
      auto stats = allocator->getDeviceStats(0);
      std::cout << stats.reserved_bytes[0].current << " " << stats.allocated_bytes[0].current << "\n";
    }
  } catch (const c10::OutOfMemoryError&) {
    std::cout << "oom\n";
  } catch (const std::exception& error) {
    std::cout << "error " << error.what() << std::endl;
    _exit(1);
  }
  std::cout << "retries " << allocator->getDeviceStats(0).num_alloc_retries << "\n";
  auto segments = allocator->snapshot({0, 0}, true).segments;
  std::sort(segments.begin(), segments.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (auto& segment : segments) {
    std::cout << "S " << segment.total_size << " " << (size_t)segment.stream << " " << !segment.is_large << " "
              << segment.is_expandable;
    for (auto& block : segment.blocks) std::cout << " " << block.size << ":" << block.allocated;
    std::cout << "\n";
  }
  std::cout.flush();
  _exit(0);  // what is live stays: the runtime is gone before the allocator
}
