// A CUDA runtime without a device: it counts bytes and hands out addresses, rising, never twice.
// Enough of it for torch's caching allocator (libc10_cuda.so), segments of both kinds. FAKE_CAPACITY: bytes of the device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {
size_t used = 0;
unsigned long long next_address = 0x7F0000000000ull;
std::unordered_map<unsigned long long, size_t> sizes;
std::vector<size_t> handles;

size_t capacity() {
  static const char* text = getenv("FAKE_CAPACITY");
  return text ? strtoull(text, nullptr, 10) : 1ull << 46;
}

unsigned long long addresses(size_t size) {
  auto address = next_address;
  next_address += (size + (2u << 20) - 1) / (2u << 20) * (2u << 20);
  return address;
}

CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = addresses(size);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  if (used + size > capacity()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  handles.push_back(size);
  *handle = handles.size();
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  used -= handles[handle - 1];
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = 2u << 20;
  return CUDA_SUCCESS;
}

CUresult nothing(...) { return CUDA_SUCCESS; }
}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  static const std::unordered_map<std::string, void*> known = {
      {"cuMemAddressReserve", (void*)reserve},
      {"cuMemCreate", (void*)create},
      {"cuMemRelease", (void*)release},
      {"cuDeviceGetAttribute", (void*)attribute},
      {"cuMemGetAllocationGranularity", (void*)granularity},
  };
  auto at = known.find(name);
  *found = at == known.end() ? (void*)nothing : at->second;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t size) {
  if (used + size > capacity()) return cudaErrorMemoryAllocation;
  used += size;
  auto found = addresses(size);
  sizes[found] = size;
  *address = (void*)found;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  used -= sizes[(unsigned long long)address];
  sizes.erase((unsigned long long)address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity();
  *free = capacity() - used;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = capacity();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

// NVML, of which the allocator asks whether devices share a fabric: they do not.
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
}
