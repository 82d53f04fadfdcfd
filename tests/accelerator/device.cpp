// An emulated accelerator: torch's PrivateUse1 device with the host's memory and the CPU's kernels.
//
// Its tensors are not CPU tensors: an operation on both is refused, as on a GPU. Device memory is counted and can be
// limited. Counted are also kernels, bytes copied, and host synchronizations: whatever makes the host wait for the
// device on real hardware. These are reading a value, copies that are not both pinned and non-blocking, and operations
// whose output size depends on values. The device can be lost: from then on everything asked of it raises.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <map>
#include <set>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int64_t kTotalBytes = int64_t{8} << 30;

struct Counters {
  std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, limit_bytes{0};
  std::atomic<int64_t> host_syncs{0}, kernels{0}, bytes_to_device{0}, bytes_to_host{0};
  std::atomic<int64_t> kernels_until_lost{-1};  // -1: never
} counters;

// As torch reports a CUDA context that is gone: neither a kernel nor a copy works in it again.
void check_alive() {
  if (counters.kernels_until_lost != 0) return;
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 719,
      "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in the documentation (emulated).");
}

void count_kernel() {
  check_alive();
  counters.kernels++;
  if (counters.kernels_until_lost > 0) counters.kernels_until_lost--;
}

// Called with its name at each synchronization, to look for the cause.
py::object* on_sync = nullptr;

void count_sync(const std::string& name) {
  check_alive();
  counters.host_syncs++;
  if (on_sync == nullptr) return;
  py::gil_scoped_acquire acquire;
  (*on_sync)(name);
}

c10::Device the_device() { return c10::Device(kDevice, 0); }

// ---- memory

// Host memory behind a device allocation: memory of its own, or the storage of a CPU kernel's result.
struct Block {
  c10::DataPtr memory;
  c10::Storage result;
  int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) return;
  counters.live_bytes -= block->bytes;
  delete block;
}

void count_allocation(int64_t bytes) {
  check_alive();
  const int64_t live = counters.live_bytes + bytes, limit = counters.limit_bytes;
  if (limit && live > limit) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "The emulated device is out of memory: ", bytes, " bytes were asked for, ",
        counters.live_bytes.load(), " of ", limit, " are in use.");
  }
  counters.live_bytes = live;
  if (live > counters.peak_bytes) counters.peak_bytes = live;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, the_device()};
    count_allocation(static_cast<int64_t>(bytes));
    auto* block = new Block{c10::GetAllocator(c10::kCPU)->allocate(bytes), {}, static_cast<int64_t>(bytes)};
    return {block->memory.get(), block, &release, the_device()};
  }
  c10::DataPtr adopt(const c10::Storage& result) {
    const auto bytes = static_cast<int64_t>(result.nbytes());
    if (bytes == 0) return {nullptr, nullptr, &release, the_device()};
    count_allocation(bytes);
    auto* block = new Block{{}, result, bytes};
    return {result.mutable_data(), block, &release, the_device()};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { counters.peak_bytes = counters.live_bytes.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const int64_t total = counters.limit_bytes ? counters.limit_bytes.load() : kTotalBytes;
    return {total - counters.live_bytes, total};
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* entry : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*entry)[0].current = counters.live_bytes;
      (*entry)[0].peak = counters.peak_bytes;
    }
    return stats;
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kDevice, &device_memory);

// Pinned memory is ordinary memory that is known by its address.
struct PinnedMemory final : c10::Allocator {
  static std::set<void*>& addresses() {
    static auto* known = new std::set<void*>();
    return *known;
  }
  static void unpin(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    addresses().erase(memory->get());
    delete memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(std::max<size_t>(bytes, 1)));
    addresses().insert(memory->get());
    return {memory->get(), memory, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
} pinned_memory;

bool is_pinned(const at::Tensor& tensor) {
  return PinnedMemory::addresses().count(const_cast<void*>(tensor.storage().data())) > 0;
}

// ---- device and stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, the_device()); }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override { count_sync("synchronize"); }
  void synchronizeStream(const c10::Stream&) const override { count_sync("synchronize"); }
  void synchronizeEvent(void*) const override { count_sync("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void grow(c10::StorageImpl* storage, size_t bytes) {
  auto memory = device_memory.allocate(bytes);
  if (storage->data()) memcpy(memory.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override {
    return PinnedMemory::addresses().count(const_cast<void*>(data)) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ---- tensors of the one device seen from the other, without a copy

at::Tensor tensor_like(const at::Tensor& shape, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), shape.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(shape.storage_offset());
  impl->set_sizes_and_strides(shape.sizes(), shape.strides());
  return tensor;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone()) return tensor;
  auto kept = tensor.storage();
  auto* context = new c10::Storage(kept);
  c10::DataPtr data(kept.mutable_data(), context, [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept.nbytes(), std::move(data), nullptr, /*resizable=*/false);
  return tensor_like(tensor, std::move(storage), c10::DispatchKey::CPU);
}

// Results of one kernel: views of its inputs share their storage, new ones are adopted once for each storage.
struct Results {
  std::map<const void*, c10::Storage> by_address;

  void note_input(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && tensor.storage().data()) {
      by_address.emplace(tensor.storage().data(), tensor.storage());
    }
  }
  at::Tensor on_device(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    auto& storage = by_address[result.storage().data()];
    if (!storage || result.storage().data() == nullptr) {
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), result.storage().nbytes(), device_memory.adopt(result.storage()),
          &device_memory, /*resizable=*/true));
    }
    return tensor_like(result, storage, c10::DispatchKey::PrivateUse1);
  }
};

at::Tensor on_device(const at::Tensor& result) { return Results().on_device(result); }

// ---- operations with a kernel of their own

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_alive();
  const auto bytes = static_cast<int64_t>(target.nbytes());
  if (source.device() == target.device()) {
    count_kernel();
  } else if (source.device().is_cpu()) {
    counters.bytes_to_device += bytes;
    if (!(non_blocking && is_pinned(source))) count_sync("copy to device");
  } else {
    counters.bytes_to_host += bytes;
    if (!(non_blocking && is_pinned(target))) count_sync("copy to host");
  }
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  count_sync("item");
  counters.bytes_to_host += tensor.itemsize();
  return at::_local_scalar_dense(on_host(tensor));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef symbolic_size, std::optional<c10::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic_size);
  const auto bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < static_cast<size_t>(bytes)) grow(storage, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  count_kernel();
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return on_device(at::convolution(
      on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  count_kernel();
  const std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), bias_size, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

// Fused attention, as CUDA and Ascend's plugin have it: without it torch would keep all scores for the backward pass.
using Attention = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto cpu = at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, grouped);
  const bool fused = cpu == static_cast<int64_t>(at::SDPBackend::flash_attention) && !(mask && mask->requires_grad());
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

Attention attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    double dropout, bool causal, bool, std::optional<double> scale) {
  count_kernel();
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), dropout, causal, host_bias, scale);
  const auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {on_device(out), on_device(logsumexp), none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, int64_t, int64_t, double dropout, bool causal, const at::Tensor&,
    const at::Tensor&, std::optional<double> scale) {
  count_kernel();
  std::optional<at::Tensor> host_bias;
  if (bias.defined()) host_bias = on_host(bias);
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(query), on_host(key), on_host(value), on_host(out), on_host(logsumexp), dropout, causal,
      host_bias, scale);
  return {on_device(of_query), on_device(of_key), on_device(of_value), at::Tensor()};
}

// ---- all other operations: the CPU's kernel on the same memory

bool has_output_size_by_value(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero"};
  return names.count(name) > 0;
}

struct Call {
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue> given;
  std::vector<std::pair<size_t, at::Tensor>> outputs;  // "out=" arguments: the CPU's kernel sizes a tensor of its own
  Results results;
  bool on_this_device = false, on_the_cpu = false;

  bool is_indexing() const { return schema.name().find("index") != std::string::npos; }

  at::Tensor host_input(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_privateuseone()) {
      on_this_device = true;
      results.note_input(tensor);
      return on_host(tensor);
    }
    if (tensor.dim() > 0) on_the_cpu = true;
    return tensor;
  }

  // As on a GPU, an index may be on the CPU: it is sent. A mask is turned into indices, whose number the host asks for
  // (when reading, torch itself has called nonzero before).
  at::Tensor host_index(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    if (is_mask && schema.name().find("index_put") != std::string::npos) count_sync("write by mask");
    if (tensor.device().is_privateuseone()) return host_input(tensor);
    counters.bytes_to_device += tensor.nbytes();
    count_sync("index on the host");
    return tensor;
  }

  c10::IValue host_argument(size_t position) {
    const auto& value = given[position];
    const auto& argument = schema.arguments()[position];
    const auto* alias = argument.alias_info();
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      if (argument.kwarg_only() && alias && alias->isWrite() && tensor.device().is_privateuseone()) {
        on_this_device = true;
        outputs.emplace_back(position, at::empty({0}, tensor.options().device(at::kCPU)));
        return outputs.back().second;
      }
      return host_input(tensor);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (at::Tensor tensor : value.toTensorList()) tensors.push_back(host_input(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional<at::Tensor>(is_indexing() ? host_index(*tensor) : host_input(*tensor))
                                 : tensor);
      }
      return tensors;
    }
    return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
  }

  void write_outputs() {
    for (auto& [position, computed] : outputs) {
      const auto target = given[position].toTensor();
      if (target.sizes() != computed.sizes()) target.resize_(computed.sizes());
      on_host(target).copy_(computed);
    }
  }

  c10::IValue device_result(size_t position, const c10::IValue& value) {
    const auto* alias = schema.returns()[position].alias_info();
    if (value.isTensor() && alias && alias->isWrite()) {
      for (size_t index = 0; index < given.size(); index++) {
        const auto* other = schema.arguments()[index].alias_info();
        if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) return given[index];
      }
    }
    if (value.isTensor()) return results.on_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> tensors;
    for (at::Tensor tensor : value.toTensorList()) tensors.push_back(results.on_device(tensor));
    return tensors;
  }
};

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t arguments = schema.arguments().size(), base = stack->size() - arguments;
  Call call{schema, {stack->begin() + base, stack->end()}, {}, {}};
  count_kernel();
  if (has_output_size_by_value(schema.name())) count_sync(schema.name());
  for (size_t index = 0; index < arguments; index++) (*stack)[base + index] = call.host_argument(index);
  TORCH_CHECK(
      !(call.on_this_device && call.on_the_cpu),
      "Expected all tensors to be on the same device, but got some on ", the_device(), " and some on cpu, in ",
      schema.name());
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_outputs();
  const size_t returned = schema.returns().size(), first = stack->size() - returned;
  for (size_t index = 0; index < returned; index++) {
    (*stack)[first + index] = call.device_result(index, (*stack)[first + index]);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  for (const auto* name : {"native_group_norm", "native_group_norm_backward"}) {  // else torch's own, of views
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}  // namespace at::native

namespace at::autocast {
namespace {

#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

}  // namespace
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("counters", [] {
    return std::map<std::string, int64_t>{
        {"live_bytes", counters.live_bytes},       {"peak_bytes", counters.peak_bytes},
        {"host_syncs", counters.host_syncs},       {"kernels", counters.kernels},
        {"bytes_to_device", counters.bytes_to_device}, {"bytes_to_host", counters.bytes_to_host}};
  });
  m.def("on_sync", [](py::object callback) { on_sync = callback.is_none() ? nullptr : new py::object(callback); });
  m.def("reset_counters", [] {
    counters.peak_bytes = counters.live_bytes.load();
    counters.host_syncs = counters.kernels = counters.bytes_to_device = counters.bytes_to_host = 0;
  });
  m.def("lose_after", [](int64_t kernels) { counters.kernels_until_lost = kernels; });
  m.def("set_memory_limit", [](int64_t bytes) { counters.limit_bytes = bytes; });
}
