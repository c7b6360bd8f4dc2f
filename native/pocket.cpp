// pocket: trains an exported step on the samples beside it, and says what it took. `strata export` writes the folder:
// step-N/ (strata_step.h), data/train.safetensors, data/test.safetensors.
#include <libgen.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <sstream>

#include "files.h"
#include "strata_step.h"

namespace {
using strata::Bad;
using strata::Json;
using strata::Mapped;

const char* const HELP =
    "usage: pocket [DIR] [--step N] [--epochs N] [--lr X] [--seed N] [--out FILE] [--json]\n"
    "Trains step N (default: the first that is there) of a folder that `strata export` wrote (default: this program's),\n"
    "on DIR/data/train.safetensors; says loss, accuracy and memory, and writes what it trained to FILE\n"
    "(default DIR/step-N/trained.safetensors).\n";
constexpr double MIB = 1024 * 1024;
constexpr int64_t CALIBRATION = 512;  // training samples that batch norms' statistics are taken from

struct Asked {
  std::string folder, out;
  long step = -1;
  int epochs = 0;
  double lr = 0;
  uint64_t seed = 0;
  bool json = false;
};

double number(const std::string& flag, const char* text, double least, double most) {
  char* end = nullptr;
  double found = text ? strtod(text, &end) : 0;
  if (!text || end == text || *end || !(found >= least && found <= most)) throw Bad(flag + " needs a number from " + std::to_string(least) + " up");
  return found;
}

Asked parsed(int count, char** texts) {
  Asked asked;
  for (int i = 1; i < count; ++i) {
    std::string flag = texts[i];
    const char* value = i + 1 < count ? texts[i + 1] : nullptr;
    if (flag == "--json") {
      asked.json = true;
    } else if (flag.rfind("--", 0) != 0) {
      if (!asked.folder.empty()) throw Bad("give one folder, not " + asked.folder + " and " + flag);
      asked.folder = flag;
    } else {
      if (flag == "--step") asked.step = long(number(flag, value, 0, 1e6));
      else if (flag == "--epochs") asked.epochs = int(number(flag, value, 1, 1e6));
      else if (flag == "--lr") asked.lr = number(flag, value, 1e-9, 1e3);
      else if (flag == "--seed") asked.seed = uint64_t(number(flag, value, 0, 9e15));
      else if (flag == "--out") asked.out = value ? value : throw Bad("--out needs a file");
      else throw Bad("there is no option " + flag + " (pocket --help)");
      ++i;
    }
  }
  return asked;
}

std::string own_folder() {
  char path[4096];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length < 0) return ".";
  path[length] = 0;
  return dirname(path);
}

std::string step_folder(const std::string& folder, long step) {
  for (long n = step < 0 ? 0 : step; n <= (step < 0 ? 999 : step); ++n) {
    std::string found = folder + "/step-" + std::to_string(n);
    if (access((found + "/manifest.json").c_str(), F_OK) == 0) return found;
  }
  throw Bad(folder + " has no " + (step < 0 ? "step" : "step " + std::to_string(step)) + " that strata export wrote");
}

double resident(const char* key) {  // MiB
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(key, 0) == 0) return atof(line.c_str() + strlen(key) + 1) / 1024;
  return NAN;
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

struct Close {
  void operator()(strata_step* step) const { strata_step_close(step); }
};

void check(int code) {
  if (code == STRATA_OK) return;
  if (code == STRATA_BAD_INPUT) throw Bad(strata_step_error());
  throw std::runtime_error(strata_step_error());
}

struct Samples {
  std::unique_ptr<Mapped> file;
  strata_samples given{};

  explicit Samples(const std::string& path) : file(std::make_unique<Mapped>(path)) {
    auto tensors = strata::safetensors(*file);
    auto inputs = tensors.find("inputs"), labels = tensors.find("labels");
    if (inputs == tensors.end() || labels == tensors.end() || inputs->second.shape.empty()) throw Bad(path + " has no inputs and labels");
    const std::string& dtype = inputs->second.dtype;
    if (labels->second.dtype != "I64" || labels->second.shape != std::vector<int64_t>{inputs->second.shape[0]})
      throw Bad(path + " should have an int64 label for each input");
    if (dtype != "U8" && dtype != "F32" && dtype != "I64") throw Bad(path + " has inputs of " + dtype + ": U8, F32 and I64 are known");
    given.count = inputs->second.shape[0];
    given.inputs = inputs->second.data;
    given.kind = dtype == "U8" ? STRATA_UINT8 : dtype == "F32" ? STRATA_FLOAT32 : STRATA_INT64;
    given.labels = reinterpret_cast<const int64_t*>(labels->second.data);
    sizes.assign(inputs->second.shape.begin() + 1, inputs->second.shape.end());
    given.channels = given.kind == STRATA_UINT8 && !sizes.empty() ? int32_t(sizes[0]) : 0;
  }
  // The library reads as many as the manifest says.
  void check_shape(const Json& manifest) const {
    std::vector<int64_t> wanted;
    for (auto& size : manifest.at("input").at("shape").list("shape")) wanted.push_back(size.whole("a size", 1, 1 << 24));
    std::vector<int64_t> found = sizes;
    if (given.kind == STRATA_UINT8 && found.size() == 3 && wanted.size() == 3 && found[0] == 1) found[0] = wanted[0];
    if (found != wanted) throw Bad(file->path + " has inputs of another shape than the step takes");
  }
  strata_samples part(int64_t from, int64_t count, const Json& manifest) const {
    strata_samples made = given;
    int64_t size = strata::elements(sizes) * (given.kind == STRATA_UINT8 ? 1 : given.kind == STRATA_FLOAT32 ? 4 : 8);
    made.inputs = static_cast<const char*>(given.inputs) + from * size;
    made.labels += from;
    made.count = std::min(count, given.count - from);
    (void)manifest;
    return made;
  }
  std::vector<int64_t> sizes;
};

// Means over batches of the statistics of some training samples, into the step.
int64_t calibrate(strata_step* step, const Samples& train, const Json& manifest, const float* mean, const float* std) {
  int64_t size = strata_step_size(step, STRATA_BUFFERS), batch = manifest.at("micro_batch").whole("micro_batch", 1, 1 << 20);
  if (!size) return 0;
  std::vector<float> one(static_cast<size_t>(size));
  std::vector<double> sum(static_cast<size_t>(size));
  int64_t count = std::min(train.given.count, CALIBRATION), batches = 0, taken = 0;
  for (; taken < count && (batches == 0 || taken + batch <= count); taken += batch, ++batches) {
    strata_samples part = train.part(taken, std::min(batch, count - taken), manifest);
    check(strata_step_statistics(step, &part, mean, std, one.data(), size));
    for (size_t i = 0; i < one.size(); ++i) sum[i] += one[i];
  }
  for (size_t i = 0; i < one.size(); ++i) one[i] = float(sum[i] / double(batches));
  check(strata_step_write(step, STRATA_BUFFERS, one.data(), size));
  return std::min(taken, count);
}

void write_trained(strata_step* step, const Json& manifest, const std::string& path) {
  std::vector<float> values(static_cast<size_t>(strata_step_size(step, STRATA_TRAINED)));
  check(strata_step_read(step, STRATA_TRAINED, values.data(), int64_t(values.size())));
  std::ostringstream header;
  int64_t at = 0;
  for (auto& one : manifest.at("trained").list("trained")) {
    std::vector<int64_t> shape;
    header << (header.tellp() ? "," : "{") << '"' << one.at("name").text("name") << "\":{\"dtype\":\"F32\",\"shape\":[";
    for (auto& size : one.at("shape").list("shape")) {
      header << (shape.empty() ? "" : ",") << size.whole("a size", 0, int64_t(1) << 40);
      shape.push_back(size.whole("a size", 0, int64_t(1) << 40));
    }
    int64_t end = at + 4 * strata::elements(shape);
    header << "],\"data_offsets\":[" << at << ',' << end << "]}";
    at = end;
  }
  std::string text = header.str() + "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8).write(text.data(), std::streamsize(length));
  file.write(reinterpret_cast<const char*>(values.data()), std::streamsize(4 * values.size()));
  if (!file.flush()) throw Bad(path + " cannot be written");
}

struct Progress {
  bool quiet;
  int64_t per_epoch;
  double sum = 0, begun = seconds();
};

int said(void* context, int64_t batch, int64_t batches, double loss) {
  auto* progress = static_cast<Progress*>(context);
  progress->sum += loss;
  if (batch % progress->per_epoch == 0 && !progress->quiet) {
    printf("epoch %ld of %ld: loss %.4f, %.1f s\n", long(batch / progress->per_epoch), long(batches / progress->per_epoch),
           progress->sum / double(progress->per_epoch), seconds() - progress->begun);
    fflush(stdout);
    progress->sum = 0;
  }
  return 0;
}

std::vector<float> floats(const Json* list) {
  std::vector<float> made;
  if (list && !list->is_nothing())
    for (auto& one : list->list("mean and std")) made.push_back(float(one.number("mean and std")));
  return made;
}

int run(const Asked& asked) {
  std::string folder = asked.folder.empty() ? own_folder() : asked.folder;
  std::string own = step_folder(folder, asked.step);
  double before = resident("VmHWM:");
  std::unique_ptr<strata_step, Close> step(strata_step_open(own.c_str()));
  if (!step) throw Bad(own + ": " + strata_step_error());
  std::string text = strata_step_manifest(step.get());
  Json manifest = Json::parse(text.data(), text.size());
  Samples train(folder + "/data/train.safetensors"), test(folder + "/data/test.safetensors");
  train.check_shape(manifest);
  test.check_shape(manifest);
  const Json *data = manifest.find("data"), *execution = manifest.find("execution");
  auto entry = [](const Json* from, const char* key) { return from ? from->find(key) : nullptr; };
  std::vector<float> mean = floats(entry(data, "mean")), std = floats(entry(data, "std"));
  if (mean.size() != std.size()) throw Bad("the manifest has another number of means than of standard deviations");
  if (!mean.empty() && int64_t(mean.size()) != manifest.at("input").at("shape").list("shape")[0].whole("channels", 1, 1 << 20))
    throw Bad("the manifest has no mean for each channel");
  auto setting = [&](const Json* from, const char* key, double otherwise) {
    const Json* found = entry(from, key);
    return found && !found->is_nothing() ? found->number(key) : otherwise;
  };
  const Json* augmentation = entry(data, "augmentation");
  std::string name = augmentation && !augmentation->is_nothing() ? augmentation->text("augmentation") : "none";
  int64_t batch = manifest.at("batch").whole("batch", 1, 1 << 20);
  Progress progress{asked.json, (train.given.count + batch - 1) / batch};
  strata_training training{};
  training.epochs = asked.epochs ? asked.epochs : int32_t(setting(&manifest, "epochs", 1));
  training.lr = float(asked.lr ? asked.lr : setting(&manifest, "lr", 0.1));
  training.momentum = float(setting(execution, "momentum", 0.9));
  training.weight_decay = float(setting(execution, "weight_decay", 0));
  training.clip = float(setting(execution, "clip", 0));
  training.proximal = float(setting(execution, "proximal", 0));
  training.order_seed = asked.seed;
  training.augmentation_seed = asked.seed + 1;
  training.dropout_seed = asked.seed + 2;
  training.augmentation = name.c_str();
  training.mean = mean.empty() ? nullptr : mean.data();
  training.std = std.empty() ? nullptr : std.data();
  training.progress = said;
  training.context = &progress;
  if (!asked.json)
    printf("%s: batch %ld in parts of %ld, %ld samples; %.2f MiB for the step, by its plan %.2f MiB\n", own.c_str(), long(batch),
           long(manifest.at("micro_batch").whole("micro_batch", 1, 1 << 20)), long(train.given.count),
           double(strata_step_bytes(step.get(), STRATA_BYTES_TOTAL)) / MIB, manifest.at("bytes").at("peak").number("peak") / MIB);
  double begun = seconds();
  strata_trained trained{};
  check(strata_step_train(step.get(), &train.given, &training, &trained));
  double taken = seconds() - begun;
  std::string out = asked.out.empty() ? own + "/trained.safetensors" : asked.out;
  write_trained(step.get(), manifest, out);
  strata_scores scores{};
  const Json* methods = manifest.find("methods");
  bool evaluates = entry(methods, "evaluate") && entry(methods, "statistics");
  int64_t seen = 0;
  if (evaluates) {
    seen = calibrate(step.get(), train, manifest, training.mean, training.std);
    check(strata_step_evaluate(step.get(), &test.given, 0, 0, training.mean, training.std, &scores, nullptr));
  }
  double most = resident("VmHWM:"), accuracy = scores.samples ? double(scores.correct) / double(scores.samples) : NAN;
  if (asked.json) {
    printf("{\"step\": \"%s\", \"batches\": %ld, \"loss\": %.6g, ", own.c_str(), long(trained.batches), trained.loss);
    if (evaluates) printf("\"accuracy\": %.6f, ", accuracy);
    printf("\"seconds\": %.3f, \"step_bytes\": %ld, \"vm_hwm_kib\": %ld, \"trained\": \"%s\"}\n", taken, long(trained.bytes),
           long(most * 1024), out.c_str());
    return 0;
  }
  if (evaluates)
    printf("accuracy %.3f on %ld test samples (batch norm statistics of %ld training samples)\n", accuracy, long(scores.samples), long(seen));
  printf("memory: %.1f MiB resident at the most (VmHWM), %.1f MiB before the step was opened; arena %.2f MiB, weights %.2f MiB, "
         "momentum %.2f MiB, kernels' scratch %.2f MiB\n",
         most, before, double(strata_step_bytes(step.get(), STRATA_BYTES_ARENA)) / MIB,
         double(strata_step_bytes(step.get(), STRATA_BYTES_WEIGHTS)) / MIB, double(strata_step_bytes(step.get(), STRATA_BYTES_MOMENTUM)) / MIB,
         double(strata_step_bytes(step.get(), STRATA_BYTES_SCRATCH)) / MIB);
  printf("time: %.1f s for %ld batches, %.1f ms each; trained weights: %s\n", taken, long(trained.batches),
         1e3 * taken / double(std::max<int64_t>(1, trained.batches)), out.c_str());
  return 0;
}
}  // namespace

int main(int count, char** texts) {
  for (int i = 1; i < count; ++i)
    if (std::string(texts[i]) == "--help" || std::string(texts[i]) == "-h") return fputs(HELP, stdout) < 0;
  try {
    return run(parsed(count, texts));
  } catch (const Bad& error) {
    fprintf(stderr, "pocket: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fprintf(stderr, "pocket: %s\n", error.what());
    return 1;
  }
}
