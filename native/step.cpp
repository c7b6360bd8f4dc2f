// strata_step.h by ExecuTorch's runtime. A program takes everything that the network holds as inputs, so weights,
// gradients' sums, momentum and the batch are memory of this file's, and the arena is the program's alone.
#include "strata_step.h"

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>

#include "files.h"
#include "kernels.h"
#include "random.h"

namespace runtime = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::TensorImpl;
using runtime::EValue;
using strata::Bad;
using strata::Json;
using strata::Mapped;

namespace {
constexpr int64_t MOST_SAMPLES = 1 << 20, MOST_ELEMENTS = int64_t(1) << 40;
constexpr size_t ALIGNMENT = 64;
const char *const INPUT = "@input", *const LABELS = "@labels";

thread_local std::string last_error;
thread_local std::string last_log;  // of the runtime: why it refused something

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int guarded(const std::function<int()>& work) {
  try {
    last_error.clear();
    return work();
  } catch (const Bad& error) {
    last_error = error.what();
    return STRATA_BAD_INPUT;
  } catch (const std::bad_alloc&) {
    last_error = "there is not enough memory for this step";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return STRATA_FAILED;
}

void keep_log(et_timestamp_t, et_pal_log_level_t, const char*, const char*, size_t, const char* message,
              size_t length) {
  last_log.assign(message, std::min<size_t>(length, 300));
}

void prepare_runtime() {
  static const bool done = [] {
    // Where a process has ExecuTorch's Python module too, that has registered itself, and registering twice prints a
    // line on stderr: only the log is taken over then.
    const runtime::PalImpl* pal = runtime::get_pal_impl();
    if (pal->source_filename == nullptr) {
      runtime::register_pal(runtime::PalImpl::create(keep_log, __FILE__));
    } else {
      const_cast<runtime::PalImpl*>(pal)->emit_log_message = keep_log;
    }
    runtime::runtime_init();
    if (!strata::register_kernels()) throw Failed("the runtime has no room for Strata's kernels");
    return true;
  }();
  (void)done;
}

void check(runtime::Error error, const std::string& what) {
  if (error == runtime::Error::Ok) return;
  if (error == runtime::Error::MemoryAllocationFailed) throw std::bad_alloc();
  throw Failed(what + (last_log.empty() ? " (error " + std::to_string(int(error)) + " of the runtime)" : ": " + last_log));
}

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
  int64_t count, offset;  // within its list
};

struct Row {  // one of the manifest's lists
  std::vector<Entry> entries;
  int64_t count = 0;
};

struct Free {
  void operator()(void* data) const { free(data); }
};
using Block = std::unique_ptr<void, Free>;

Block block(size_t bytes) {
  void* made = nullptr;
  if (posix_memalign(&made, ALIGNMENT, std::max<size_t>(bytes, ALIGNMENT))) throw std::bad_alloc();
  return Block(made);
}

// A tensor that a program is given.
struct Given {
  std::vector<executorch::aten::SizesType> sizes;
  std::vector<executorch::aten::DimOrderType> order;
  std::vector<executorch::aten::StridesType> strides;
  std::unique_ptr<TensorImpl> impl;

  EValue value(ScalarType type, void* data, const std::vector<int64_t>& shape) {
    sizes.assign(shape.begin(), shape.end());
    order.resize(sizes.size());
    strides.resize(sizes.size());
    executorch::aten::StridesType stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= std::max<executorch::aten::SizesType>(1, sizes[i])) {
      order[i] = executorch::aten::DimOrderType(i);
      strides[i] = stride;
    }
    impl = std::make_unique<TensorImpl>(type, ssize_t(sizes.size()), sizes.data(), data, order.data(), strides.data());
    return EValue(executorch::aten::Tensor(impl.get()));
  }
};

struct Program {  // one method of step.pte, loaded
  std::vector<std::string> inputs, outputs;
  executorch::extension::MallocMemoryAllocator own, temporary;
  std::vector<runtime::Span<uint8_t>> spans;
  std::unique_ptr<runtime::HierarchicalAllocator> planned;
  std::unique_ptr<runtime::MemoryManager> manager;
  std::unique_ptr<runtime::Method> method;
  std::vector<Given> given;
};
}  // namespace

struct strata_step {
  std::string text;
  std::string folder;
  std::unique_ptr<Mapped> program_file, weights_file;
  Block program_copy;
  std::unique_ptr<executorch::extension::BufferDataLoader> loader;
  std::unique_ptr<runtime::Program> program;
  std::array<Row, 3> rows;
  std::vector<float> trained, buffers;
  std::unique_ptr<float, Free> frozen_own;  // zeros whose pages nobody has touched, until they are written
  std::vector<const float*> frozen;  // by entry
  std::map<std::string, std::pair<int, size_t>> where;  // a tensor's list and entry
  std::vector<int64_t> input_shape;
  int64_t input_count = 1, batch = 1, micro_batch = 1, classes = 0;
  bool takes_ids = false, summed = false, keeps_momentum = true;
  size_t arena_bytes = 0;
  Block arena;
  std::map<std::string, Json> methods;
  std::map<std::string, std::unique_ptr<Program>> loaded;
  strata::Surroundings surroundings;
  int64_t gradient_bytes = 0, momentum_bytes = 0, batch_bytes = 0, start_bytes = 0;

  void read_manifest();
  void read_row(const Json& manifest, const char* key, int list);
  void read_methods(const Json& manifest);
  void open_program(const void* data, size_t size);
  void load_weights(const std::string& path);
  void use_own_frozen();
  Program& method(const std::string& name);
  void bind(Program& one, const std::string& name);
  const float* at(int list, size_t entry) const;
  void run(Program& one, const std::string& name, void* inputs, int64_t* labels, int64_t count);
  std::vector<int64_t> batch_shape(int64_t count) const {
    std::vector<int64_t> shape{count};
    shape.insert(shape.end(), input_shape.begin(), input_shape.end());
    return shape;
  }
  int64_t weights_bytes() const { return 4 * (rows[0].count + rows[1].count + rows[2].count); }
  int64_t total_bytes() const {
    return int64_t(arena_of("train")) + weights_bytes() + gradient_bytes + momentum_bytes + batch_bytes + start_bytes;
  }
  size_t arena_of(const std::string& name) const;
};

namespace {
// --- samples ----------------------------------------------------------------------------------------------------------

// What is random in augmenting a batch, drawn as torch draws it; of a sample by its place in the batch.
struct Draws {
  std::vector<int64_t> tops, lefts;
  std::vector<float> flips, upends;
};

struct Augmentation {
  int64_t padding = 0;
  bool crops = false, upends = false;

  Augmentation(const char* name, const std::vector<int64_t>& shape) {
    std::string asked = name ? name : "none";
    if (asked == "none") return;
    std::string plain = asked.size() > 6 && asked.substr(asked.size() - 6) == "-vflip" ? asked.substr(0, asked.size() - 6) : asked;
    if (plain != "cifar" && plain != "pictures")
      throw Bad("augmentation " + asked + " is not known here: none, cifar, cifar-vflip, pictures and pictures-vflip are");
    crops = true;
    upends = plain != asked;
    padding = plain == "cifar" ? 4 : shape.back() / 8;
  }
  Draws draw(strata::Generator& generator, int64_t count) const {
    Draws made;
    if (!crops) return made;
    auto places = generator.integers(2 * padding + 1, 2 * count);
    made.tops.assign(places.begin(), places.begin() + count);
    made.lefts.assign(places.begin() + count, places.end());
    made.flips = generator.uniform(count);
    if (upends) made.upends = generator.uniform(count);
    return made;
  }
};

// Samples as the network takes them.
class Reader {
 public:
  Reader(const strata_step& step, const strata_samples* samples, const float* mean, const float* std, const char* augmentation)
      : step(step), samples(*samples), augmentation(samples->kind == STRATA_UINT8 ? augmentation : nullptr, step.input_shape) {
    if (samples->count < 1 || !samples->inputs || !samples->labels) throw Bad("there are no samples: give at least one, with its label");
    if (samples->count > MOST_ELEMENTS / step.input_count) throw Bad("there cannot be so many samples");
    for (int64_t i = 0; i < samples->count; ++i)
      if (samples->labels[i] < 0 || samples->labels[i] >= step.classes)
        throw Bad("the label of sample " + std::to_string(i) + " is " + std::to_string(samples->labels[i]) + ": labels run from 0 to " +
                  std::to_string(step.classes - 1));
    if (samples->kind == STRATA_UINT8) {
      if (step.takes_ids || step.input_shape.size() != 3) throw Bad("uint8 samples are images, and this network takes none");
      if (samples->channels != 0 && samples->channels != 1 && samples->channels != step.input_shape[0])
        throw Bad("images have " + std::to_string(step.input_shape[0]) + " channels here, or one that all get");
      bool grey = samples->channels == 1 && step.input_shape[0] != 1;
      stored = grey ? 1 : step.input_shape[0];
      levels.resize(size_t(256 * step.input_shape[0]));
      for (int64_t c = 0; c < step.input_shape[0]; ++c)
        for (int v = 0; v < 256; ++v) {
          volatile float value = float(v) / 255.0f;  // each rounding on its own, as torch does it
          if (mean && std) {
            value = value - mean[c];
            value = value / std[c];
          }
          levels[size_t(256 * c + v)] = value;
        }
    } else if (samples->kind != (step.takes_ids ? STRATA_INT64 : STRATA_FLOAT32)) {
      throw Bad(step.takes_ids ? "this network takes int64 inputs" : "this network takes uint8 images or float32 inputs");
    } else if (augmentation && std::string(augmentation) != "none") {
      throw Bad("only uint8 images can be augmented: give none");
    }
  }
  size_t item() const { return step.takes_ids ? 8 : 4; }
  const int64_t* labels() const { return samples.labels; }
  Draws draw(strata::Generator& generator, int64_t count) const { return augmentation.draw(generator, count); }

  // Sample `index`, which is number `place` of its batch, to `to`.
  void read(int64_t index, const Draws& draws, int64_t place, void* to) const {
    if (samples.kind != STRATA_UINT8) {
      size_t bytes = size_t(step.input_count) * item();
      memcpy(to, static_cast<const char*>(samples.inputs) + size_t(index) * bytes, bytes);
      return;
    }
    int64_t channels = step.input_shape[0], h = step.input_shape[1], w = step.input_shape[2];
    auto* image = static_cast<const uint8_t*>(samples.inputs) + index * stored * h * w;
    float* out = static_cast<float*>(to);
    bool moved = !draws.tops.empty();
    int64_t top = moved ? draws.tops[size_t(place)] - augmentation.padding : 0;
    int64_t left = moved ? draws.lefts[size_t(place)] - augmentation.padding : 0;
    bool flipped = moved && draws.flips[size_t(place)] < 0.5f;
    bool upended = !draws.upends.empty() && draws.upends[size_t(place)] < 0.5f;
    for (int64_t c = 0; c < channels; ++c) {
      const uint8_t* plane = image + (stored == 1 ? 0 : c) * h * w;
      const float* level = levels.data() + 256 * c;
      for (int64_t y = 0; y < h; ++y) {
        int64_t from = (upended ? h - 1 - y : y) + top;
        for (int64_t x = 0; x < w; ++x) {
          int64_t across = (flipped ? w - 1 - x : x) + left;
          bool inside = from >= 0 && from < h && across >= 0 && across < w;
          *out++ = level[inside ? plane[from * w + across] : 0];
        }
      }
    }
  }

 private:
  const strata_step& step;
  strata_samples samples;
  Augmentation augmentation;
  int64_t stored = 0;
  std::vector<float> levels;  // by channel: what each of 256 values becomes
};

std::vector<std::string> texts(const Json& list, const char* what) {
  std::vector<std::string> made;
  for (auto& one : list.list(what)) made.push_back(one.text(what));
  return made;
}

void check_list(int list) {
  if (list < STRATA_TRAINED || list > STRATA_BUFFERS) throw Bad("there is no list " + std::to_string(list) + " of tensors");
}
}  // namespace

// --- opening ------------------------------------------------------------------------------------------------------------

void strata_step::read_row(const Json& manifest, const char* key, int list) {
  Row& row = rows[size_t(list)];
  for (auto& one : manifest.at(key).list(key)) {
    Entry entry{one.at("name").text("a tensor's name"), {}, 0, row.count};
    for (auto& size : one.at("shape").list("a tensor's shape")) entry.shape.push_back(size.whole("a size", 0, MOST_ELEMENTS));
    entry.count = strata::elements(entry.shape);
    if (entry.count < 0 || entry.count > MOST_ELEMENTS - row.count) throw Bad("has a tensor of no possible size: " + entry.name);
    row.count += entry.count;
    if (!where.emplace(entry.name, std::make_pair(list, row.entries.size())).second) throw Bad("has two tensors " + entry.name);
    row.entries.push_back(std::move(entry));
  }
}

void strata_step::read_methods(const Json& manifest) {
  const Json& all = manifest.at("methods");
  for (const char* name : {"train", "evaluate", "statistics"}) {
    const Json* one = all.kind == Json::OBJECT ? all.find(name) : nullptr;
    if (!one) continue;
    texts(one->at("inputs"), "a method's inputs");
    texts(one->at("outputs"), "a method's outputs");
    methods[name] = *one;
  }
  if (!methods.count("train")) throw Bad("has no method train");
  std::string lacking;
  for (auto& name : texts(manifest.at("operators"), "operators"))
    if (!runtime::registry_has_op_function(name.c_str())) lacking += (lacking.empty() ? "" : ", ") + name;
  if (!lacking.empty()) throw Failed("this device has no kernel for what the program calls: " + lacking);
}

void strata_step::read_manifest() {
  try {
    Json manifest = Json::parse(text.data(), text.size());
    if (manifest.kind != Json::OBJECT || manifest.at("what").text("what") != "strata step") throw Bad("is not that of a step");
    if (manifest.at("format").whole("format", 0, 1 << 20) != 1)
      throw Bad("is of another format than 1, which is all that this library reads");
    classes = manifest.at("classes").whole("classes", 1, 1 << 24);
    batch = manifest.at("batch").whole("batch", 1, MOST_SAMPLES);
    micro_batch = manifest.at("micro_batch").whole("micro_batch", 1, batch);
    const Json& input = manifest.at("input");
    for (auto& size : input.at("shape").list("the input's shape")) input_shape.push_back(size.whole("a size", 1, 1 << 24));
    if ((input_count = strata::elements(input_shape)) < 1) throw Bad("has an input of no possible size");
    std::string dtype = input.at("dtype").text("the input's dtype");
    if (dtype != "float32" && dtype != "int64") throw Bad("has inputs of " + dtype + "; float32 and int64 are known");
    takes_ids = dtype == "int64";
    std::string gradients = manifest.at("gradients").text("gradients");
    if (gradients != "outputs" && gradients != "summed") throw Bad("says gradients are " + gradients + ": outputs or summed are known");
    summed = gradients == "summed";
    if (const Json* execution = manifest.find("execution"))
      if (const Json* momentum = execution->find("momentum")) keeps_momentum = momentum->number("momentum") != 0;
    read_row(manifest, "trained", STRATA_TRAINED);
    read_row(manifest, "frozen", STRATA_FROZEN);
    read_row(manifest, "buffers", STRATA_BUFFERS);
    read_methods(manifest);
  } catch (const Bad& error) {
    throw Bad(std::string("the manifest ") + error.what());
  }
  trained.assign(size_t(rows[STRATA_TRAINED].count), 0.f);
  buffers.assign(size_t(rows[STRATA_BUFFERS].count), 0.f);
  use_own_frozen();
  momentum_bytes = keeps_momentum ? 4 * rows[STRATA_TRAINED].count : 0;
  gradient_bytes = summed ? 4 * rows[STRATA_TRAINED].count : 0;
  batch_bytes = micro_batch * (input_count * int64_t(takes_ids ? 8 : 4) + 8);
}

void strata_step::use_own_frozen() {
  if (!frozen_own) frozen_own.reset(static_cast<float*>(calloc(size_t(std::max<int64_t>(1, rows[STRATA_FROZEN].count)), sizeof(float))));
  if (!frozen_own) throw std::bad_alloc();
  frozen.clear();
  for (auto& entry : rows[STRATA_FROZEN].entries) frozen.push_back(frozen_own.get() + entry.offset);
}

// `mapped`: its pages need not stay in memory once they are looked at.
static void check_file(const std::string& manifest, const char* name, const void* data, size_t size, bool mapped) {
  Json json = Json::parse(manifest.data(), manifest.size());
  const Json* file = json.at("files").find(name);
  if (!file) throw Bad(std::string("the manifest says nothing of ") + name);
  int64_t bytes = file->at("bytes").whole("bytes of a file", 0, MOST_ELEMENTS);
  if (uint64_t(bytes) != size)
    throw Bad(std::string(name) + " has " + std::to_string(size) + " bytes and should have " + std::to_string(bytes) + ": it was cut short or is another one");
  char found[16];
  snprintf(found, sizeof found, "%08x", unsigned(strata::crc32(data, size, mapped)));
  if (file->at("crc32").text("crc32") != found) throw Bad(std::string(name) + " is damaged: its checksum is not the manifest's");
}

void strata_step::open_program(const void* data, size_t size) {
  check_file(text, "step.pte", data, size, false);
  if (reinterpret_cast<uintptr_t>(data) % 16) {
    program_copy = block(size);
    memcpy(program_copy.get(), data, size);
    data = program_copy.get();
  }
  loader = std::make_unique<executorch::extension::BufferDataLoader>(data, size);
  auto found = runtime::Program::load(loader.get(), runtime::Program::Verification::InternalConsistency);
  if (!found.ok()) throw Bad("step.pte is no program that this runtime takes" + (last_log.empty() ? "" : ": " + last_log));
  program = std::make_unique<runtime::Program>(std::move(*found));
  for (auto& [name, _] : methods) arena_bytes = std::max(arena_bytes, arena_of(name));
}

size_t strata_step::arena_of(const std::string& name) const {
  auto meta = program->method_meta(name.c_str());
  if (!meta.ok()) throw Bad("step.pte has no method " + name);
  size_t sum = 0;
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) sum += (size_t(*meta->memory_planned_buffer_size(i)) + 15) / 16 * 16;
  return sum;
}

void strata_step::load_weights(const std::string& path) {
  auto file = std::make_unique<Mapped>(path);
  auto tensors = strata::safetensors(*file);
  std::vector<const float*> mapped;
  for (int list : {STRATA_TRAINED, STRATA_FROZEN, STRATA_BUFFERS})
    for (auto& entry : rows[size_t(list)].entries) {
      auto found = tensors.find(entry.name);
      if (found == tensors.end()) throw Bad(path + " has no " + entry.name);
      if (found->second.dtype != "F32" || found->second.shape != entry.shape)
        throw Bad(path + ": " + entry.name + " is not float32 of the manifest's shape");
      auto* values = reinterpret_cast<const float*>(found->second.data);
      if (list == STRATA_FROZEN) mapped.push_back(values);
      else std::copy(values, values + entry.count, (list == STRATA_TRAINED ? trained : buffers).data() + entry.offset);
    }
  frozen = std::move(mapped);
  weights_file = std::move(file);
  frozen_own.reset();
  for (auto& [name, one] : loaded) bind(*one, name);
}

// --- programs -----------------------------------------------------------------------------------------------------------

const float* strata_step::at(int list, size_t entry) const {
  if (list == STRATA_FROZEN) return frozen[entry];
  return (list == STRATA_TRAINED ? trained : buffers).data() + rows[size_t(list)].entries[entry].offset;
}

Program& strata_step::method(const std::string& name) {
  auto there = loaded.find(name);
  if (there != loaded.end()) return *there->second;
  if (!methods.count(name)) throw Bad("this step was exported without the method " + name);
  auto made = std::make_unique<Program>();
  made->inputs = texts(methods.at(name).at("inputs"), "a method's inputs");
  made->outputs = texts(methods.at(name).at("outputs"), "a method's outputs");
  auto meta = program->method_meta(name.c_str());
  if (!meta.ok()) throw Bad("step.pte has no method " + name);
  if (meta->num_inputs() != made->inputs.size() || meta->num_outputs() != made->outputs.size())
    throw Bad("the manifest's method " + name + " is not the program's: another number of inputs or outputs");
  if (!arena) arena = block(arena_bytes);
  auto* at = static_cast<uint8_t*>(arena.get());
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    size_t size = size_t(*meta->memory_planned_buffer_size(i));
    made->spans.push_back({at, size});
    at += (size + 15) / 16 * 16;
  }
  made->planned = std::make_unique<runtime::HierarchicalAllocator>(
      runtime::Span<runtime::Span<uint8_t>>(made->spans.data(), made->spans.size()));
  made->manager = std::make_unique<runtime::MemoryManager>(&made->own, made->planned.get(), &made->temporary);
  auto found = program->load_method(name.c_str(), made->manager.get());
  check(found.error(), "the program's method " + name + " cannot be loaded");
  made->method = std::make_unique<runtime::Method>(std::move(*found));
  made->given.resize(made->inputs.size());
  bind(*made, name);
  return *(loaded[name] = std::move(made));
}

void strata_step::bind(Program& one, const std::string& name) {
  auto meta = program->method_meta(name.c_str());
  for (size_t i = 0; i < one.inputs.size(); ++i) {
    if (one.inputs[i] == INPUT || one.inputs[i] == LABELS) continue;
    auto found = where.find(one.inputs[i]);
    if (found == where.end()) throw Bad("the manifest's method " + name + " takes " + one.inputs[i] + ", which no list has");
    auto [list, entry] = found->second;
    auto wanted = meta->input_tensor_meta(i);
    auto& shape = rows[size_t(list)].entries[entry].shape;
    bool fits = wanted.ok() && wanted->scalar_type() == ScalarType::Float && wanted->sizes().size() == shape.size() &&
                std::equal(shape.begin(), shape.end(), wanted->sizes().begin());
    if (!fits) throw Bad("the program takes " + one.inputs[i] + " in another shape than the manifest's");
    EValue value = one.given[i].value(ScalarType::Float, const_cast<float*>(this->at(list, entry)), shape);
    check(one.method->set_input(value, i), "the program does not take " + one.inputs[i]);
  }
}

void strata_step::run(Program& one, const std::string& name, void* inputs, int64_t* labels, int64_t count) {
  for (size_t i = 0; i < one.inputs.size(); ++i) {
    bool is_input = one.inputs[i] == INPUT;
    if (!is_input && one.inputs[i] != LABELS) continue;
    auto type = is_input && !takes_ids ? ScalarType::Float : ScalarType::Long;
    EValue value = one.given[i].value(type, is_input ? inputs : labels, is_input ? batch_shape(count) : std::vector<int64_t>{count});
    check(one.method->set_input(value, i), "the program does not take " + std::to_string(count) + " samples");
  }
  last_log.clear();
  strata::surroundings = &surroundings;
  auto error = one.method->execute();
  strata::surroundings = nullptr;
  check(error, "the program's method " + name + " has failed");
}

namespace {
const executorch::aten::Tensor& output(const Program& one, size_t at, int64_t count) {
  const EValue& value = one.method->get_output(at);
  if (!value.isTensor() || value.toTensor().scalar_type() != ScalarType::Float || value.toTensor().numel() != count)
    throw Failed("the program's output " + one.outputs[at] + " is not of the size that the manifest says");
  return value.toTensor();
}

// --- training -----------------------------------------------------------------------------------------------------------

class Training {
 public:
  Training(strata_step& step, const strata_samples* samples, const strata_training* asked)
      : step(step),
        asked(*asked),
        reader(step, samples, asked->mean, asked->std, asked->augmentation),
        count(samples->count),
        program(step.method("train")) {
    batch = asked->batch ? asked->batch : step.batch;
    micro = asked->micro_batch ? asked->micro_batch : step.micro_batch;
    micro = std::min(micro, batch);
    if (asked->epochs < 1 || asked->epochs > MOST_SAMPLES) throw Bad("epochs should be a whole number from 1");
    if (batch < 1 || batch > MOST_SAMPLES) throw Bad("the batch should be a whole number from 1");
    if (micro < 1 || micro > step.micro_batch)
      throw Bad("the program takes at most " + std::to_string(step.micro_batch) + " samples at a time, not " + std::to_string(micro));
    for (float value : {asked->lr, asked->momentum, asked->weight_decay, asked->proximal, asked->clip})
      if (!std::isfinite(value) || value < 0) throw Bad("learning rate, momentum, weight decay, proximal and clip are numbers from 0");
    for (size_t i = 0; i < program.outputs.size(); ++i) {
      if (program.outputs[i] == "@loss") {
        loss_at = int64_t(i);
        continue;
      }
      auto found = step.where.find(program.outputs[i]);
      if (found == step.where.end() || found->second.first != STRATA_TRAINED)
        throw Bad("the manifest's method train gives a gradient of " + program.outputs[i] + ", which is not trained");
      gradients.emplace_back(i, &step.rows[STRATA_TRAINED].entries[found->second.second]);
    }
    if (loss_at < 0) throw Bad("the manifest's method train gives no loss");
    allocate();
  }

  int run(strata_trained* found) {
    strata::Generator order(asked.order_seed), augmentation(asked.augmentation_seed);
    int64_t batches = asked.epochs * ((count + batch - 1) / batch), done = 0;
    double total = 0;
    int code = STRATA_OK;
    step.surroundings.seed = asked.dropout_seed;
    step.surroundings.pass = 0;
    for (int64_t epoch = 0; epoch < asked.epochs && code == STRATA_OK; ++epoch) {
      std::vector<int64_t> drawn;
      if (!asked.order) drawn = order.permutation(count);
      const int64_t* indices = asked.order ? asked.order + epoch * count : drawn.data();
      for (int64_t from = 0; from < count && code == STRATA_OK; from += batch) {
        int64_t size = std::min(batch, count - from);
        double loss = take_step(indices + from, size, augmentation);
        total += loss * double(size);
        ++done;
        if (asked.progress && asked.progress(asked.context, done, batches, loss)) {
          code = STRATA_STOPPED;
          last_error = "training was stopped after " + std::to_string(done) + " of " + std::to_string(batches) + " batches";
        }
      }
    }
    if (found) *found = {total / double(std::min(done * batch, asked.epochs * count)), done, step.total_bytes()};
    return code;
  }

 private:
  void allocate() {
    size_t parameters = size_t(step.rows[STRATA_TRAINED].count);
    inputs = block(size_t(micro * step.input_count) * reader.item());
    labels.resize(size_t(micro));
    if (asked.momentum) momenta.assign(parameters, 0.f);
    if (step.summed || micro < batch) sums.assign(parameters, 0.f);
    if (asked.proximal) start = step.trained;
    step.batch_bytes = micro * (step.input_count * int64_t(reader.item()) + 8);
    step.momentum_bytes = 4 * int64_t(momenta.size());
    step.gradient_bytes = 4 * int64_t(sums.size());
    step.start_bytes = 4 * int64_t(start.size());
    step.surroundings.sums.clear();
    if (step.summed)
      for (auto& entry : step.rows[STRATA_TRAINED].entries) step.surroundings.sums.emplace_back(sums.data() + entry.offset, entry.count);
  }

  double take_step(const int64_t* indices, int64_t size, strata::Generator& augmentation) {
    Draws draws = reader.draw(augmentation, size);
    bool adds = step.summed || micro < size;
    if (adds) std::fill(sums.begin(), sums.end(), 0.f);
    double loss = 0;
    for (int64_t from = 0; from < size; from += micro) {
      int64_t part = std::min(micro, size - from);
      for (int64_t i = 0; i < part; ++i) {
        int64_t index = indices[from + i];
        if (index < 0 || index >= count) throw Bad("the order names sample " + std::to_string(index) + " of " + std::to_string(count));
        reader.read(index, draws, from + i, static_cast<char*>(inputs.get()) + size_t(i * step.input_count) * reader.item());
        labels[size_t(i)] = reader.labels()[index];
      }
      float share = float(double(part) / double(size));
      step.surroundings.share = share;
      step.run(program, "train", inputs.get(), labels.data(), part);
      ++step.surroundings.pass;
      loss += double(output(program, size_t(loss_at), 1).const_data_ptr<float>()[0]) * (part == size ? 1.0 : double(share));
      if (adds && !step.summed) add(share);
    }
    update(adds);
    return loss;
  }

  void add(float share) {
    for (auto& [at, entry] : gradients) {
      const float* gradient = output(program, at, entry->count).const_data_ptr<float>();
      float* sum = sums.data() + entry->offset;
      for (int64_t i = 0; i < entry->count; ++i) sum[i] += share * gradient[i];
    }
  }

  // SGD: v = momentum v + gradient + decay w, w = w - lr v
  void update(bool added) {
    float factor = asked.clip ? clipped(added) : 1;
    for (auto& [at, entry] : gradients) {
      const float* gradient = gradient_of(at, *entry, added);
      float *w = step.trained.data() + entry->offset, *v = momenta.empty() ? nullptr : momenta.data() + entry->offset;
      const float* from = start.empty() ? nullptr : start.data() + entry->offset;
      for (int64_t i = 0; i < entry->count; ++i) {
        float g = gradient[i];
        if (from) g += asked.proximal * (w[i] - from[i]);
        g = g * factor + asked.weight_decay * w[i];
        if (v) g = v[i] = asked.momentum * v[i] + g;
        w[i] -= asked.lr * g;
      }
    }
  }

  const float* gradient_of(size_t at, const Entry& entry, bool added) const {
    return added ? sums.data() + entry.offset : output(program, at, entry.count).const_data_ptr<float>();
  }

  float clipped(bool added) const {
    double squares = 0;
    for (auto& [at, entry] : gradients) {
      const float *gradient = gradient_of(at, *entry, added), *w = step.trained.data() + entry->offset;
      for (int64_t i = 0; i < entry->count; ++i) {
        double g = gradient[i];
        if (!start.empty()) g += asked.proximal * (w[i] - start[size_t(entry->offset + i)]);
        squares += g * g;
      }
    }
    return float(std::min(1.0, asked.clip / (std::sqrt(squares) + 1e-6)));
  }

  strata_step& step;
  strata_training asked;
  Reader reader;
  int64_t count, batch, micro, loss_at = -1;
  Program& program;
  std::vector<std::pair<size_t, const Entry*>> gradients;  // the program's output, and whose it is
  Block inputs;
  std::vector<int64_t> labels;
  std::vector<float> momenta, sums, start;
};

// A batch for evaluation, in place.
struct Batch {
  Block inputs;
  std::vector<int64_t> labels;

  Batch(const strata_step& step, const Reader& reader, int64_t most)
      : inputs(block(size_t(most * step.input_count) * reader.item())), labels(size_t(most)) {}
  void fill(const strata_step& step, const Reader& reader, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      reader.read(from + i, Draws(), i, static_cast<char*>(inputs.get()) + size_t(i * step.input_count) * reader.item());
      labels[size_t(i)] = reader.labels()[from + i];
    }
  }
};

void add_scores(const float* scores, int64_t classes, int64_t label, strata_scores& found) {
  float most = *std::max_element(scores, scores + classes);
  double sum = 0;
  for (int64_t j = 0; j < classes; ++j) sum += std::exp(double(scores[j]) - most);
  found.loss_sum += most + std::log(sum) - scores[label];
  found.correct += std::max_element(scores, scores + classes) - scores == label;
  ++found.samples;
}

strata_step* opened(const std::function<void(strata_step&)>& work) {
  std::unique_ptr<strata_step> made;
  int code = guarded([&] {
    prepare_runtime();
    made = std::make_unique<strata_step>();
    work(*made);
    return STRATA_OK;
  });
  return code == STRATA_OK ? made.release() : nullptr;
}
}  // namespace

// --- the interface ------------------------------------------------------------------------------------------------------

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int strata_step_abi(void) { return STRATA_STEP_ABI; }

EXPORTED const char* strata_step_error(void) { return last_error.c_str(); }

EXPORTED strata_step* strata_step_open(const char* folder) {
  return opened([&](strata_step& step) {
    if (!folder) throw Bad("give the folder of a step");
    step.folder = folder;
    Mapped manifest(step.folder + "/manifest.json");
    step.text.assign(manifest.data, manifest.size);
    step.read_manifest();
    step.program_file = std::make_unique<Mapped>(step.folder + "/step.pte");
    step.open_program(step.program_file->data, step.program_file->size);
    std::string weights = step.folder + "/weights.safetensors";
    if (access(weights.c_str(), F_OK) == 0) {
      {
        Mapped file(weights);
        check_file(step.text, "weights.safetensors", file.data, file.size, true);
      }
      step.load_weights(weights);
    }
  });
}

EXPORTED strata_step* strata_step_open_memory(const char* manifest, size_t manifest_size, const void* program, size_t program_size) {
  return opened([&](strata_step& step) {
    if (!manifest || !program) throw Bad("give a manifest and a program");
    step.text.assign(manifest, manifest_size);
    step.read_manifest();
    step.open_program(program, program_size);
  });
}

EXPORTED int strata_step_load(strata_step* step, const char* weights) {
  return guarded([&] {
    if (!weights) throw Bad("give a file of weights");
    step->load_weights(weights);
    return STRATA_OK;
  });
}

EXPORTED const char* strata_step_manifest(const strata_step* step) { return step->text.c_str(); }

EXPORTED int64_t strata_step_size(const strata_step* step, int list) {
  return list < STRATA_TRAINED || list > STRATA_BUFFERS ? -1 : step->rows[size_t(list)].count;
}

static void check_count(const strata_step* step, int list, const void* values, int64_t count) {
  check_list(list);
  int64_t wanted = step->rows[size_t(list)].count;
  if (count != wanted) throw Bad("the list has " + std::to_string(wanted) + " numbers, not " + std::to_string(count));
  if (!values && count) throw Bad("there are no values");
}

EXPORTED int strata_step_write(strata_step* step, int list, const float* values, int64_t count) {
  return guarded([&] {
    check_count(step, list, values, count);
    if (list == STRATA_FROZEN) {
      step->use_own_frozen();
      std::copy(values, values + count, step->frozen_own.get());
      for (auto& [name, one] : step->loaded) step->bind(*one, name);
    } else {
      std::copy(values, values + count, (list == STRATA_TRAINED ? step->trained : step->buffers).begin());
    }
    return STRATA_OK;
  });
}

EXPORTED int strata_step_read(const strata_step* step, int list, float* values, int64_t count) {
  return guarded([&] {
    check_count(step, list, values, count);
    auto& entries = step->rows[size_t(list)].entries;
    for (size_t i = 0; i < entries.size(); ++i) {
      const float* from = step->at(list, i);
      std::copy(from, from + entries[i].count, values + entries[i].offset);
    }
    return STRATA_OK;
  });
}

EXPORTED int strata_step_lend(strata_step* step, const float* frozen, int64_t count) {
  return guarded([&] {
    check_count(step, STRATA_FROZEN, frozen, count);
    step->frozen_own.reset();
    step->frozen.clear();
    for (auto& entry : step->rows[STRATA_FROZEN].entries) step->frozen.push_back(frozen + entry.offset);
    for (auto& [name, one] : step->loaded) step->bind(*one, name);
    return STRATA_OK;
  });
}

EXPORTED int strata_step_train(strata_step* step, const strata_samples* samples, const strata_training* training, strata_trained* found) {
  return guarded([&] {
    if (!samples || !training) throw Bad("give samples, and how to train on them");
    return Training(*step, samples, training).run(found);
  });
}

EXPORTED int strata_step_evaluate(strata_step* step, const strata_samples* samples, int32_t batch, int own_statistics, const float* mean,
                                  const float* std, strata_scores* found, float* scores) {
  return guarded([&] {
    if (!samples) throw Bad("give samples");
    Reader reader(*step, samples, mean, std, nullptr);
    const char* name = own_statistics ? "statistics" : "evaluate";
    Program& program = step->method(name);
    int64_t most = batch > 0 ? std::min<int64_t>(batch, step->micro_batch) : step->micro_batch;
    Batch taken(*step, reader, most);
    strata_scores sums{0, 0, 0};
    for (int64_t from = 0; from < samples->count; from += most) {
      int64_t count = std::min(most, samples->count - from);
      taken.fill(*step, reader, from, count);
      step->run(program, name, taken.inputs.get(), taken.labels.data(), count);
      const float* rows = output(program, 0, count * step->classes).const_data_ptr<float>();
      if (scores) std::copy(rows, rows + count * step->classes, scores + from * step->classes);
      for (int64_t i = 0; i < count; ++i) add_scores(rows + i * step->classes, step->classes, taken.labels[size_t(i)], sums);
    }
    if (found) *found = sums;
    return STRATA_OK;
  });
}

EXPORTED int strata_step_statistics(strata_step* step, const strata_samples* samples, const float* mean, const float* std, float* buffers,
                                    int64_t count) {
  return guarded([&] {
    if (!samples) throw Bad("give samples");
    check_count(step, STRATA_BUFFERS, buffers, count);
    if (samples->count > step->micro_batch)
      throw Bad("the program takes at most " + std::to_string(step->micro_batch) + " samples at a time, not " + std::to_string(samples->count));
    Reader reader(*step, samples, mean, std, nullptr);
    Program& program = step->method("statistics");
    Batch taken(*step, reader, samples->count);
    taken.fill(*step, reader, 0, samples->count);
    step->run(program, "statistics", taken.inputs.get(), taken.labels.data(), samples->count);
    std::copy(step->buffers.begin(), step->buffers.end(), buffers);
    for (size_t i = 1; i < program.outputs.size(); ++i) {
      auto found = step->where.find(program.outputs[i]);
      if (found == step->where.end() || found->second.first != STRATA_BUFFERS)
        throw Bad("the manifest's method statistics gives " + program.outputs[i] + ", which is no buffer");
      auto& entry = step->rows[STRATA_BUFFERS].entries[found->second.second];
      const float* values = output(program, i, entry.count).const_data_ptr<float>();
      std::copy(values, values + entry.count, buffers + entry.offset);
    }
    return STRATA_OK;
  });
}

EXPORTED int64_t strata_step_bytes(const strata_step* step, int which) {
  switch (which) {
    case STRATA_BYTES_ARENA: return int64_t(step->arena_of("train"));
    case STRATA_BYTES_WEIGHTS: return step->weights_bytes();
    case STRATA_BYTES_GRADIENTS: return step->gradient_bytes;
    case STRATA_BYTES_MOMENTUM: return step->momentum_bytes;
    case STRATA_BYTES_BATCH: return step->batch_bytes;
    case STRATA_BYTES_TOTAL: return step->total_bytes();
    case STRATA_BYTES_SCRATCH: return int64_t(strata::scratch_bytes());
    default: return -1;
  }
}

EXPORTED void strata_step_close(strata_step* step) { delete step; }
