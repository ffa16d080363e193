#pragma once
// Memory, streams, events and random numbers of the stand-in accelerator: see operations.cpp.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using namespace c10;

namespace {
constexpr auto KIND = DeviceType::PrivateUse1;
constexpr auto KEY = DispatchKey::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t MEMORY = size_t(16) << 30;  // of each device, unless a test sets less

thread_local int current = 0;
thread_local int64_t streams[DEVICES] = {0};
std::atomic<int64_t> next_stream{1}, next_event{1};

// --- the listener ------------------------------------------------------------------------------------------------------

using Places = std::vector<int64_t>;  // addresses of blocks of memory, or the number of an event
using Listener = void (*)(const char* kind, const char* text, int64_t stream, int, const int64_t*, int, const int64_t*);
std::atomic<Listener> listener{nullptr};

struct Recording {  // what a thread captures: see graphs.h
  int device = 0;
  std::vector<std::function<void()>> operations;
  std::set<int64_t> read, written;
  std::map<void*, std::vector<char>> before;  // the device's memory when the capture began
  std::vector<void*> blocks;  // allocated within the capture: they belong to the graph
};
thread_local Recording* recording = nullptr;

void refuse_within_capture(const std::string& what) {
  TORCH_CHECK(!recording, "operation not permitted when stream is capturing: ", what);
}

void tell(const char* kind, const std::string& text, int64_t stream, const Places& read = {}, const Places& write = {}) {
  if (recording && !strcmp(kind, "op")) return;  // it is not done now
  if (auto told = listener.load()) told(kind, text.c_str(), stream, read.size(), read.data(), write.size(), write.data());
}

// A number for a stream of a device that no stream of the other device has.
int64_t global(int64_t stream, int device) { return stream * DEVICES + device; }
int64_t stream_of(Device d) { return global(streams[d.index()], d.index()); }
int64_t place(const Tensor& t) { return t.has_storage() ? reinterpret_cast<int64_t>(t.storage().data()) : 0; }

// --- memory ------------------------------------------------------------------------------------------------------------

struct Block {
  int device;
  int64_t stream;
  size_t size;
  bool used_elsewhere;  // `record_stream` was called: on a GPU, not reused before that stream has passed
  bool captured = false;  // belongs to a graph
  bool given_back = false;  // to the graph
};

// As CUDA's: a freed block is at once reused by the stream that it was allocated on.
struct CachingAllocator final : DeviceAllocator {
  std::mutex mutex;
  std::map<void*, Block> blocks;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> cached;
  size_t used[DEVICES] = {0}, reserved[DEVICES] = {0}, peak[DEVICES] = {0};
  size_t limit[DEVICES] = {MEMORY, MEMORY}, largest = MEMORY;

  DataPtr allocate(size_t bytes) override {
    const int device = current;
    const Device where(KIND, device);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    const size_t size = (bytes + 511) / 512 * 512;
    Places dropped;
    void* found = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto& free_blocks = cached[{stream_of(where), size}];
      if (size <= largest && !free_blocks.empty()) {
        found = free_blocks.back();
        free_blocks.pop_back();
      } else if (size <= largest) {
        if (reserved[device] + size > limit[device]) dropped = drop_cached(device);
        if (reserved[device] + size <= limit[device] && !posix_memalign(&found, 64, size)) {
          blocks[found] = {device, stream_of(where), size, false};
          reserved[device] += size;
        }
      }
      if (found) peak[device] = std::max(peak[device], used[device] += size);
      if (found && recording) {
        blocks[found].captured = true;
        recording->blocks.push_back(found);
      }
    }
    forget(dropped);
    TORCH_CHECK_WITH(OutOfMemoryError, found, "standin out of memory. Tried to allocate ", size, " bytes on ", where);
    return {found, found, &release, where};
  }
  static void release(void* pointer);
  void give_back(void* pointer) {
    Places dropped;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto& block = blocks.at(pointer);
      if (block.captured) {
        block.given_back = true;
        return;
      }
      used[block.device] -= block.size;
      if (!block.used_elsewhere) return cached[{block.stream, block.size}].push_back(pointer);
      reserved[block.device] -= block.size;
      blocks.erase(pointer);
      dropped = {reinterpret_cast<int64_t>(pointer)};
    }
    forget(dropped);
  }
  void drop_graph(const std::vector<void*>& own) {
    for (void* pointer : own) {
      bool unused;
      {
        std::lock_guard<std::mutex> lock(mutex);
        auto& block = blocks.at(pointer);
        unused = block.given_back;
        block.captured = block.given_back = false;
      }
      if (unused) give_back(pointer);
    }
  }
  // To be called with the lock. What it returns is to be given to `forget` without it: the listener waits for Python.
  Places drop_cached(int device) {
    Places dropped;
    for (auto& [key, pointers] : cached) {
      if (key.first % DEVICES != device) continue;
      for (void* pointer : pointers) {
        reserved[device] -= key.second;
        blocks.erase(pointer);
        dropped.push_back(reinterpret_cast<int64_t>(pointer));
      }
      pointers.clear();
    }
    return dropped;
  }
  static void forget(const Places& dropped) {
    if (dropped.empty()) return;
    tell("free", "", 0, {}, dropped);
    for (int64_t pointer : dropped) free(reinterpret_cast<void*>(pointer));
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t = {0, 0}) override {
    Places dropped;
    for (int device = 0; device < DEVICES; ++device) {
      std::lock_guard<std::mutex> lock(mutex);
      for (int64_t pointer : drop_cached(device)) dropped.push_back(pointer);
    }
    forget(dropped);
  }
  void recordStream(const DataPtr& pointer, Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(pointer.get());
    if (found != blocks.end() && found->second.stream != global(stream.id(), stream.device_index()))
      found->second.used_elsewhere = true;
  }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = used[device];
    stats.allocated_bytes[0].peak = peak[device];
    stats.reserved_bytes[0].current = reserved[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = used[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {limit[device] - std::min(limit[device], reserved[device]), limit[device]};
  }
};
CachingAllocator& memory() {
  static auto* allocator = new CachingAllocator;  // never destroyed: tensors may outlive everything
  return *allocator;
}
void CachingAllocator::release(void* pointer) {
  if (pointer) memory().give_back(pointer);
}

struct PinnedAllocator final : Allocator {
  std::mutex mutex;
  std::set<const void*> pointers;
  static void release(void* pointer);
  DataPtr allocate(size_t bytes) override {
    tell("pinned", std::to_string(bytes), 0);
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, 64, bytes + 1), "no memory to pin");
    std::lock_guard<std::mutex> lock(mutex);
    pointers.insert(pointer);
    return {pointer, pointer, &release, Device(kCPU)};
  }
  bool has(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    return pointers.count(pointer);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}
void PinnedAllocator::release(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().pointers.erase(pointer);
  free(pointer);
}

// --- devices, streams and events ---------------------------------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  static int index(Device d) { return d.index() < 0 ? current : d.index(); }
  static Stream made(Device d, int64_t id) { return Stream(Stream::UNSAFE, Device(KIND, index(d)), id); }
  static int64_t number(const Stream& s) { return global(s.id(), s.device_index()); }
  static int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device d) const override {
    Device old(KIND, current);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "invalid device ordinal ", int(d.index()));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { current = index(d); }
  Stream getStream(Device d) const override { return made(d, streams[index(d)]); }
  Stream getDefaultStream(Device d) const override { return made(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return made(d, next_stream++); }
  Stream getNewStream(Device d, int) const override { return made(d, next_stream++); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    streams[s.device_index()] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    *event = reinterpret_cast<void*>(next_event++);
    tell("record", "", number(s), {number(*event)});
  }
  void block(void* event, const Stream& s) const override { tell("wait", "", number(s), {number(event)}); }
  bool queryEvent(void* event) const override {  // what was recorded is done by now, and the host knows it
    tell("query", "", 0, {number(event)});
    return true;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { wait("stream", number(s)); }
  void synchronizeEvent(void* event) const override { wait("event", 0, {number(event)}); }
  void synchronizeDevice(const DeviceIndex d) const override { wait("device", d); }
  static void wait(const char* what, int64_t stream, const Places& events = {}) {
    refuse_within_capture("to wait");
    tell("sync", what, stream, events);
  }
  void recordDataPtrOnStream(const DataPtr& pointer, const Stream& s) const override { memory().recordStream(pointer, s); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};

struct On {  // makes a device the current one
  int old = current;
  explicit On(Device d) { current = Guard::index(d); }
  ~On() { current = old; }
};

at::Generator& generator(int device) {
  static auto* made = new std::vector<at::Generator>{
      at::make_generator<at::CPUGeneratorImpl>(1), at::make_generator<at::CPUGeneratorImpl>(1)};
  return (*made)[device];
}

void resize_storage(StorageImpl* storage, size_t bytes) {
  auto made = memory().allocate(bytes);
  if (storage->nbytes()) memcpy(made.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(KIND, d)); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice(Device(KIND, d)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return generator(d < 0 ? current : d); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(1); }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  bool isPinnedPtr(const void* pointer) const override { return pinned().has(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    On on(storage.device());
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
}  // namespace
