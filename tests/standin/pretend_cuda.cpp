// Has torch believe that there is a CUDA device, on a build for the CPU: just enough to trace and to generate code with
// fake tensors of that device. Nothing can be computed on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace {
constexpr auto KIND = DeviceType::CUDA;

struct Guard final : impl::DeviceGuardImplInterface {
  static Stream only(Device d) { return Stream(Stream::UNSAFE, Device(KIND, std::max<DeviceIndex>(0, d.index())), 0); }
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(KIND, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device d) const override { return only(d); }
  Stream getDefaultStream(Device d) const override { return only(d); }
  Stream exchangeStream(Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
}  // namespace

namespace at {
struct PretendHooks : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(PretendHooks)
}  // namespace at

extern "C" void pretend() {
  static Guard guard;
  impl::registerDeviceGuard(KIND, &guard);
}
