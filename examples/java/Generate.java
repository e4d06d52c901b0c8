import cadenza.v1.Chat;
import cadenza.v1.ChatMessage;
import cadenza.v1.GenerateRequest;
import cadenza.v1.GenerateResponse;
import cadenza.v1.GenerationServiceGrpc;
import cadenza.v1.GenerationServiceGrpc.GenerationServiceBlockingStub;
import cadenza.v1.PromptPart;
import cadenza.v1.SampleOutput;
import cadenza.v1.SamplingParams;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;

/** Calls Cadenza by generated stubs: streams an answer, reads an error's details, cancels, sets a deadline. */
public final class Generate {
  private final GenerationServiceBlockingStub stub;

  private Generate(GenerationServiceBlockingStub stub) {
    this.stub = stub;
  }

  /** Arguments: HOST:PORT and a prompt. */
  public static void main(String[] arguments) throws Exception {
    String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
    String prompt = arguments.length > 1 ? arguments[1] : "What is 27 + 48?";
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(target)
            .usePlaintext()
            .maxInboundMessageSize(64 << 20) // 4 MiB by default; many logprobs need more
            .keepAliveTime(60, TimeUnit.SECONDS) // off by default
            .build();
    try {
      Generate example = new Generate(GenerationServiceGrpc.newBlockingStub(channel));
      example.stream(prompt);
      example.showRefusal(prompt);
      example.cancel(prompt);
      example.exceedDeadline(prompt);
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  /** A chat of one message, answered greedily. A field that is not set takes the server's default. */
  private static GenerateRequest.Builder request(String prompt) {
    ChatMessage message = ChatMessage.newBuilder().setRole("user").setContent(prompt).build();
    return GenerateRequest.newBuilder()
        .addPrompt(PromptPart.newBuilder().setChat(Chat.newBuilder().addMessages(message)))
        .setSamplingParams(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(64));
  }

  private static GenerateRequest endless(String prompt) {
    GenerateRequest.Builder request = request(prompt);
    request.getSamplingParamsBuilder().setMaxTokens(1000).setIgnoreEos(true);
    return request.build();
  }

  private void stream(String prompt) {
    Iterator<GenerateResponse> responses = stub.generate(request(prompt).build());
    while (responses.hasNext()) {
      for (SampleOutput output : responses.next().getOutputsList()) {
        System.out.print(output.getText());
        System.out.flush();
      }
    }
    System.out.println();
  }

  /** The details of an error are google.rpc messages; a wrong field is refused with its path. */
  private void showRefusal(String prompt) throws InvalidProtocolBufferException {
    GenerateRequest.Builder request = request(prompt);
    request.getSamplingParamsBuilder().setTopP(2);
    try {
      stub.generate(request.build()).next();
    } catch (StatusRuntimeException error) {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            String what = violation.getField() + ": " + violation.getDescription();
            System.out.println("[" + error.getStatus().getCode() + "] " + what);
          }
        }
      }
    }
  }

  /** A blocking call is cancelled with its context; the server frees what the request held. */
  private void cancel(String prompt) throws Exception {
    Context.CancellableContext context = Context.current().withCancellation();
    context.run(
        () -> {
          Iterator<GenerateResponse> responses = stub.generate(endless(prompt));
          responses.next();
          context.cancel(null);
          readToTheError(responses);
        });
  }

  private void exceedDeadline(String prompt) {
    readToTheError(stub.withDeadlineAfter(50, TimeUnit.MILLISECONDS).generate(endless(prompt)));
  }

  private static void readToTheError(Iterator<GenerateResponse> responses) {
    try {
      responses.forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      System.out.println("[" + error.getStatus().getCode() + "]");
    }
  }
}
