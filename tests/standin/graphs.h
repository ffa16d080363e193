#pragma once
// Captured graphs of the stand-in accelerator: see operations.cpp.
//
// What a thread does between the begin and the end of a capture is recorded, and leaves no trace in memory. A replay
// does it again on the same memory. As with CUDA, a graph owns the memory that was allocated within it, and only that.
// What a GPU can't do within a capture raises: waiting, copies from and to the host, and the default stream.
#include <ATen/core/GraphImplInterface.h>

#include "device.h"

namespace {
void record(std::function<void()> operation, const Places& read, const Places& written) {
  if (!recording) return;
  recording->operations.push_back(std::move(operation));
  recording->read.insert(read.begin(), read.end());
  recording->written.insert(written.begin(), written.end());
}
}  // namespace

namespace at {
struct StandinGraph final : GraphImplInterface {
  std::unique_ptr<Recording> recorded;
  explicit StandinGraph(const GraphImplArgs&) {}
  void capture_begin(MempoolId_t, GraphCaptureMode mode) override {
    refuse_within_capture("a second capture");
    TORCH_CHECK(mode == GraphCaptureMode::ThreadLocal, "the stand-in captures in the mode thread_local only");
    TORCH_CHECK(streams[current], "graphs must be captured on a non-default stream");
    recorded = std::make_unique<Recording>();
    recorded->device = current;
    std::lock_guard<std::mutex> lock(memory().mutex);
    for (auto& [pointer, block] : memory().blocks)
      if (block.device == current) {
        auto* bytes = static_cast<char*>(pointer);
        recorded->before[pointer] = {bytes, bytes + block.size};
      }
    recording = recorded.get();
  }
  void capture_end() override {
    TORCH_CHECK(recording == recorded.get() && recording, "no capture to end");
    recording = nullptr;
    std::lock_guard<std::mutex> lock(memory().mutex);
    for (int64_t place : recorded->written) {  // other threads go on writing elsewhere
      auto found = recorded->before.find(reinterpret_cast<void*>(place));
      if (found != recorded->before.end()) memcpy(found->first, found->second.data(), found->second.size());
    }
    recorded->before.clear();
  }
  void instantiate() override {}
  void replay() override {
    refuse_within_capture("a replay");
    TORCH_CHECK(recorded, "nothing was captured");
    for (auto& operation : recorded->operations) operation();
    tell("op", "graph", stream_of(Device(KIND, recorded->device)), {recorded->read.begin(), recorded->read.end()},
         {recorded->written.begin(), recorded->written.end()});
  }
  void reset() override {
    if (recorded) memory().drop_graph(recorded->blocks);
    recorded.reset();
  }
  ~StandinGraph() override { reset(); }
  MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
};
REGISTER_GRAPH_IMPL(STANDIN, StandinGraph)
}  // namespace at
